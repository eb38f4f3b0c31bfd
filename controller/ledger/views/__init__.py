"""Views of the ledger: directives, plans, metrics and reports. Pure functions of the state."""
