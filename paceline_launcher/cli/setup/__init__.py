"""Commands of the set-up: config files, checks of the machine, completion and alerts."""
