"""Fake engines, controllers, sinks and rewards."""
