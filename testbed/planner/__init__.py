"""Capacity planner: the pace of a run on GPUs that are not there yet, from measured or published
times."""
