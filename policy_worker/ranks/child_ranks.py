"""Ranks that rank 0 has started on its own host: its child processes, and memory that all of them
share.

The kernel kills the children when rank 0 ends (PR_SET_PDEATHSIG), and rank 0 exits at once if one
of them ends. A child ties its life to rank 0's before anything slow is imported.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.process.lifetime import die_with
from paceline.process.structured_log import event

log = logging.getLogger(__name__)

END_S = 10.0
_EPOCH = struct.Struct("=q")


class RankLife(Protocol):
    """Life of one rank, which the others share beside collectives. Until ``begin_end`` the end of
    another rank ends this process."""

    @property
    def follower_pids(self) -> Sequence[int]:
        """Process ids of the ranks from 1 on that run on rank 0's host and that it has started;
        known to rank 0."""

    @property
    def ended_epoch(self) -> int:
        """Newest epoch that a rank has ended, as far as this rank knows; 0 for none. Any thread,
        without blocking."""

    def end_epoch(self, epoch: int) -> None:
        """Epochs up to ``epoch`` are over for all ranks. Any thread, without blocking."""

    def begin_end(self) -> None:
        """From here on the other ranks may end."""

    def await_end(self) -> None:
        """After begin_end(). Rank 0: waits until the others have ended, at most 10 s. The others:
        say that they end."""


RANK_SETTINGS = "PACELINE_REPLICA"
"""Environment variable: RankSettings as a JSON object."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place in its replica, wherever it runs."""

    rank: int
    size: int
    identity: str
    device: str
    interface: str
    """Network interface towards the other ranks."""
    host: str = ""
    """Address for ranks of other replicas; empty: the one of rank 0."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings for a rank that rank 0 starts."""

    rank: int
    size: int
    identity: str
    port: int
    parent: int
    epochs: int
    device: str
    threads: int
    config: str
    """For the ranks, as JSON. Not in the store: every user of the machine could read and change it
    there."""

    @property
    def place(self) -> RankPlace:
        return RankPlace(self.rank, self.size, self.identity, self.device, LOOPBACK)


def die_with_parent() -> RankSettings:
    """First call of a rank above 0, before it imports torch: from here on the kernel kills this
    process when rank 0 ends, however it ends. If it has ended already, this process exits."""
    settings = RankSettings(**json.loads(os.environ[RANK_SETTINGS]))
    die_with(settings.parent)
    # Ctrl-C reaches the whole process group; rank 0 decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return settings


class ChildRanks:
    """``RankLife`` of ranks on one host."""

    def __init__(
        self,
        rank: int,
        size: int,
        epochs: mmap.mmap,
        children: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
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
        return max(map(self._ended_by, range(self._size)))

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
        return int(_EPOCH.unpack_from(self._epochs, rank * _EPOCH.size)[0])

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        status = child.wait()
        if not self._ending.is_set():
            event(log, "rank died, replica ends", logging.ERROR, pid=child.pid, status=status)
            if -status in (signal.SIGKILL, signal.SIGTERM):
                # Killed from outside, the replica is too: a launcher that starts failures anew
                # only so often must not take this for one.
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
