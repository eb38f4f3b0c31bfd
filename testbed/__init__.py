"""Real fleets, protocol-only workers and fault injection, shared by tests and benchmarks."""
