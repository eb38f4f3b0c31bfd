"""Tests of Paceline; each process has one thread for arithmetic, for several tests run side by
side."""

import os
import signal

# Before torch is imported. Two threads on two busy cores take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# A shell starts what runs in the background with Ctrl-C ignored, and so would be every command that
# a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
