"""General helpers that know nothing of models, stores or runs: what any package may use."""
