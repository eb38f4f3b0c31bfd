"""Recorded data: rows that hold their completions, from the row's fields to a group."""
