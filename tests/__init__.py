"""Tests of Paceline; each process has one thread for arithmetic, for several tests run side by side."""

import os

# Before torch is imported. Two threads on two busy cores take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
