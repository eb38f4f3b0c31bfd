"""Exports of a run: run files, metric sinks, OpenTelemetry traces."""
