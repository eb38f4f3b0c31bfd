"""Metrics of evaluations: estimators over the samples of a prompt, and their means over a set of
prompts."""
