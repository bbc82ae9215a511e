"""How this machine is measured."""
