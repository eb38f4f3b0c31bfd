"""Checks of what a run reads: model, data, reward functions, objective."""
