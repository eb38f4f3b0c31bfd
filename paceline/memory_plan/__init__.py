"""Arithmetic of a run's memory: what each of its processes needs, by part, before anything is
loaded."""
