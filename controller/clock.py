"""Clock that the controller is handed: the system's, or a virtual one in the simulator."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The two readings of the ``time`` module that the controller uses; seconds."""

    def time(self) -> float:
        """Unix time. It may jump."""
        ...

    def monotonic(self) -> float:
        """Time for measuring intervals. It never falls."""
        ...


SYSTEM_CLOCK: Clock = time
