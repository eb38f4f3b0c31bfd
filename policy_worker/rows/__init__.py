"""Packed rows of a step: packing, attention, forwards, log-probs."""
