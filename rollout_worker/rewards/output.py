"""Output that reward functions print, copied to the worker's log up to a limit."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import dataclass

from paceline.process.structured_log import event

logger = logging.getLogger(__name__)

BYTES = 64 << 10
"""What is copied in each ``WINDOW_S``; the rest is counted and left out."""
WINDOW_S = 60.0
_READ = 64 << 10


@dataclass(slots=True)
class RewardOutput:
    """Output of one scoring process. A reward that prints in each call of a long run, or a gigabyte
    in one, must not fill the disk."""

    _left: int = BYTES
    _dropped: int = 0
    _began: float = 0.0

    async def copy(self, stream: asyncio.StreamReader) -> None:
        """Until the end of ``stream``."""
        try:
            while data := await stream.read(_READ):
                now = time.monotonic()
                if now - self._began >= WINDOW_S:
                    self._say_dropped()
                    self._began, self._left = now, BYTES
                kept, self._left = data[: self._left], max(0, self._left - len(data))
                self._dropped += len(data) - len(kept)
                if kept:
                    sys.stderr.write(kept.decode(errors="replace"))
                    sys.stderr.flush()
        finally:
            self._say_dropped()

    def _say_dropped(self) -> None:
        if self._dropped:
            event(logger, "reward output left out", logging.WARNING, bytes=self._dropped)
            self._dropped = 0
