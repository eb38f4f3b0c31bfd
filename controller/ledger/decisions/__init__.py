"""Decisions of the ledger, by subject: pure functions from a command and the state to events."""
