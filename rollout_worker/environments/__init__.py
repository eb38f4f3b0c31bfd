"""Completions that are made by more than one call of the model: several turns, tools, agents."""
