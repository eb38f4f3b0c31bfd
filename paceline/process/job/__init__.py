"""Place of a process in its job: environments that launchers set, and the GPUs that it sees."""
