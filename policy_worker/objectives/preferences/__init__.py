"""Preference objectives: losses over pairs and labelled completions, and reward models."""
