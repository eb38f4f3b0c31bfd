"""Directives, plans, metrics and reports of the ledger's state. Pure."""
