"""Kubernetes targets: a run as plain manifests, and as a PyTorchJob."""
