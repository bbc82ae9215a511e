"""Model folders and adapters, read into a store and written from it."""
