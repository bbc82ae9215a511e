"""A model's calls, captured: blocks, fake runs, tracing, what a call saves for backward."""
