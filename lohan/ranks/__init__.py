"""Several processes that share a run: what each holds, how they talk, start and agree."""
