"""A training step's computation: batch, packing, log-probs, gradients, optimizer."""
