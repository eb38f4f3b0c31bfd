"""The local fleet: starts a run's processes on this machine, restarts them, ends them all."""
