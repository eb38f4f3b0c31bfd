"""Arithmetic of a run's memory: bytes of each process by part, before anything is loaded."""
