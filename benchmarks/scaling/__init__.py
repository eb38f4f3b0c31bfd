"""Scaling over rollout workers whose devices are emulated, against the same work on the same GPUs
in turns."""
