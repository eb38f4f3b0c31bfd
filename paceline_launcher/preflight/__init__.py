"""Checks before a run starts, and of a machine (``paceline doctor``)."""
