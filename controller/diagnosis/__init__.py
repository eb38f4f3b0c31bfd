"""Diagnosis: what the run waits for, whose fault it is, what follows, and what a user can do."""
