"""Check of a machine with a GPU: parity with the CPU, speed, memory, publishing, and a short run
with faults."""
