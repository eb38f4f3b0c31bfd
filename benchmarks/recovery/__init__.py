"""How long a real fleet takes to get over each fault: ``python -m benchmarks.recovery``."""
