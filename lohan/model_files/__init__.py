"""Hugging Face folders: read, cut into the store, written."""
