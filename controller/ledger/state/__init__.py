"""State of the ledger, one file for each noun. The ``apply`` of an event changes it; nothing here decides."""
