"""The vLLM engine: requests, weight swaps, parity checks."""
