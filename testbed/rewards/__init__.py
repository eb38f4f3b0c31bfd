"""Reward functions that hang, crash or wait."""
