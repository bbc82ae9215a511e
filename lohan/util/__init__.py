"""What any other package may use."""
