"""Providers of worker processes: Kubernetes, Ray, or none. `paceline up` is its own provider."""
