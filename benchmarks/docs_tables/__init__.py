"""Tables of the documentation, rendered from the results of benchmarks."""
