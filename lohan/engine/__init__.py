"""What runs a step: attach, session, executor, lanes, buffers, offload."""
