"""Scorer worker: a frozen model that scores completions for rollout workers."""
