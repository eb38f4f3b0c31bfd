"""Ranks that rank 0 has started on its own host: its child processes, and memory that all of them
share.

The kernel kills the children when rank 0 ends (PR_SET_PDEATHSIG), and rank 0 exits at once if one
of them ends.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import struct
import subprocess
import threading
from collections.abc import Sequence

from paceline.process.structured_log import event

log = logging.getLogger(__name__)

END_S = 10.0
_EPOCH = struct.Struct("=q")


class ChildRanks:
    """``RankLife`` of ranks on one host."""

    def __init__(
        self,
        rank: int,
        size: int,
        epochs: mmap.mmap,
        children: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        """``epochs``: the shared memory. ``children``: the ranks from 1 on; empty on these."""
        self._rank, self._size = rank, size
        self._epochs = epochs
        self._children = children
        self._ending = threading.Event()
        for child in children:
            threading.Thread(
                target=self._watch, args=(child,), name=f"rank-{child.pid}", daemon=True
            ).start()

    @property
    def follower_pids(self) -> list[int]:
        return [child.pid for child in self._children]

    @property
    def ended_epoch(self) -> int:
        return max(self._ended_by(rank) for rank in range(self._size))

    def end_epoch(self, epoch: int) -> None:
        # Each rank writes a word of its own: two writers of one word could undo each other.
        if epoch > self._ended_by(self._rank):
            _EPOCH.pack_into(self._epochs, self._rank * _EPOCH.size, epoch)

    def begin_end(self) -> None:
        self._ending.set()

    def await_end(self) -> None:
        for child in self._children:
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _ended_by(self, rank: int) -> int:
        (epoch,) = _EPOCH.unpack_from(self._epochs, rank * _EPOCH.size)
        return int(epoch)

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        status = child.wait()
        if not self._ending.is_set():
            event(log, "rank died, replica ends", logging.ERROR, pid=child.pid, status=status)
            if -status in (signal.SIGKILL, signal.SIGTERM):
                # Killed from outside, the replica is too: a launcher that starts failures anew
                # only so often must not take this for one.
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
