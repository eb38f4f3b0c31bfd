"""Evidence about processes: what the kernel says of them, and whether they ran."""
