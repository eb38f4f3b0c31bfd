"""Scaling of the fleet: loops of the leader that call the provider and the autoscaler."""
