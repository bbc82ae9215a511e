"""Helpers for all packages: units, machine facts, traces, displays and atomic writes."""
