"""Exports of a run: run files, metric sinks, alerts, the sample archive."""
