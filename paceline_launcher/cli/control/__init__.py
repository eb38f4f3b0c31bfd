"""Commands that start and steer a run and its processes."""
