"""Mutation check: one safety check of the code removed at a time."""
