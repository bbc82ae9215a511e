"""General helpers that know nothing of models, stores or runs."""
