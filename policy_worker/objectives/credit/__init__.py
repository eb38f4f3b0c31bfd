"""Credit assignment: advantages of sequences and tokens."""
