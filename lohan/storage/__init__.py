"""Keys and bytes on SSD. Knows nothing of models, devices or plans."""
