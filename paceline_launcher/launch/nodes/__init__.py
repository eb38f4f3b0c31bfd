"""Nodes of one job: each starts its share of a run's processes, and all end with the run."""
