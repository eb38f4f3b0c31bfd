"""Ranks of one policy replica: rank group, rank workers, FSDP2 sharding."""
