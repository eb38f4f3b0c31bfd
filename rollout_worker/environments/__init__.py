"""Environments: completions of several model turns, with tools and agents."""
