"""A reward function that crashes on one prompt and hangs on another, every time."""

from __future__ import annotations

import os
import signal
import threading

KILLS, HANGS = "kills", "hangs"


def scored(completion: str, answer: str) -> float:
    """1 if the completion begins with a digit."""
    if answer == KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    if answer == HANGS:
        threading.Event().wait()
    return float(completion[:1].isdigit())
