"""Helpers that several test modules share. Test modules import from here, not from each other."""
