"""Preflight checks: packages, GPUs, Redis, ports, limits, disk, clocks, settings."""
