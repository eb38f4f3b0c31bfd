"""Operating-system processes: threads, exit, parent death, structured logs, resource use."""
