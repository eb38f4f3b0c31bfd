"""Alerts: what is worth one, and its delivery to a webhook or a command."""
