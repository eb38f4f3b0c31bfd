"""Bootstrap of a rank above 0: its life is tied to rank 0's before anything slow is imported."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass

from paceline.process.lifetime import die_with

RANK_SETTINGS = "PACELINE_REPLICA"
"""Environment variable: RankSettings as a JSON object."""


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place in its replica, wherever it runs."""

    rank: int
    size: int
    identity: str
    """Of the replica."""
    device: str
    """cpu or cuda."""
    interface: str
    """Network interface towards the other ranks."""
    host: str = ""
    """Address for ranks of other replicas; empty: the one of rank 0."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a rank that rank 0 starts is told."""

    rank: int
    size: int
    identity: str
    port: int
    """Of rank 0's key-value store."""
    parent: int
    """Process id of rank 0."""
    epochs: int
    """Descriptor of the memory that the ranks share."""
    device: str
    threads: int
    config: str
    """For the ranks, as JSON. Not in the store: every user of the machine could read and change it
    there."""

    @property
    def place(self) -> RankPlace:
        return RankPlace(self.rank, self.size, self.identity, self.device, LOOPBACK)


def die_with_parent() -> RankSettings:
    """First call of a rank above 0, before it imports torch.

    From here on the kernel kills this process when rank 0 ends, however it ends. If rank 0 has
    ended already, this process exits.
    """
    settings = RankSettings(**json.loads(os.environ[RANK_SETTINGS]))
    die_with(settings.parent)
    # Ctrl-C reaches the whole process group; rank 0 decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return settings
