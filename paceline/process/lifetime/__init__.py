"""Lifetime of processes: start, exit, waiting for an end, and ends with a parent."""
