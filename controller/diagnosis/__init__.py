"""Diagnosis: what the run waits for, whose fault it is, what happens next, and what a user can do."""
