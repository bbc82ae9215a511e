"""Descriptions of models and machines as plain data, independent of torch."""
