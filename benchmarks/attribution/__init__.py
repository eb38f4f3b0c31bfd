"""Attribution of faults: a seeded run in which faults of each kind are injected, and what the
ledger says of them."""
