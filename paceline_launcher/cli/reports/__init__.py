"""Commands that read a run: its state, events, samples and ledger."""
