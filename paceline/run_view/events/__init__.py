"""Event stream, event history and sample spans of a run."""
