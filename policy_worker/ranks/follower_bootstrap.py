"""Bootstrap of a rank above 0: its life is tied to rank 0's before anything slow is imported."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass

from paceline.process.parent_death_signal import die_with

RANK_SETTINGS = "PACELINE_REPLICA"
"""Environment variable: RankSettings as a JSON object."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """A rank's place in the replica."""

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
    """For the ranks, as JSON. Not in the store: every user of the machine could read and change it there."""


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
