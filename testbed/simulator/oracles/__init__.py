"""What must be true of a simulated run, checked without the code of the ledger."""
