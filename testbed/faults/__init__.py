"""Faults for fleets under test: signals, failpoints, partitions and slow links."""
