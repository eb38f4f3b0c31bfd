"""Offload to host memory: what the device does not need all the time."""
