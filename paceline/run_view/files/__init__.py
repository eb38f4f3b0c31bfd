"""Event, metric and log files of a run, and its sample archive."""
