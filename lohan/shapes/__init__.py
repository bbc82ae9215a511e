"""A model as numbers."""
