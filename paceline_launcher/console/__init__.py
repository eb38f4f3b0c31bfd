"""The terminal views of a run: live view, status tables, plots."""
