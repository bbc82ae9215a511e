"""A step as data: actions, lanes and waits; checked and simulated."""
