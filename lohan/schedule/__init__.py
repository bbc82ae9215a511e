"""Schedules: a training step as data that can be checked, simulated and executed."""
