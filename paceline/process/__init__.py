"""Operating-system processes: threads, exit, parent death, structured logs and resource use."""
