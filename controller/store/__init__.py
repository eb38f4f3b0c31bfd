"""Durable state in Redis: journal, group commit, election, payloads."""
