"""The launcher: starts, watches and ends the processes of a run, on one node or on several."""
