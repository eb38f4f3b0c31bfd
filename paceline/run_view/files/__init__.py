"""Files of a run: event and metric lines, logs, the fleet and the sample archive."""
