"""The control plane: a replicated controller around a pure ledger."""
