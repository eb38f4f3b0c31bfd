"""Training flows on the digit-sort demo: what each of them does to held-out accuracy."""
