"""Conformance of objectives: the properties that elastic training rests on, and their check."""
