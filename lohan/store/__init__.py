"""Keys and bytes on SSD, in generations. Knows nothing of models, devices or plans."""
