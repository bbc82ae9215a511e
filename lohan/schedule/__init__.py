"""A step as data: actions, phases and waits; checked and simulated."""
