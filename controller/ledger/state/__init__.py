"""State of the ledger by noun. The ``apply`` of an event changes it."""
