"""Recovery times of a real fleet after each fault: ``python -m benchmarks.recovery``."""
