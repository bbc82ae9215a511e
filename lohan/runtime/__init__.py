"""What runs a step: pools, weights, activations, optimizer, executor."""
