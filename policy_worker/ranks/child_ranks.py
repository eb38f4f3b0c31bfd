"""Settings of ranks that rank 0 starts on its own host, as its child processes.

The kernel kills the children when rank 0 ends (PR_SET_PDEATHSIG), and rank 0 ends at once if one of
them does (``rank_links``). A child ties its life to rank 0's before anything slow is imported.
"""

import json
import os
import signal
from dataclasses import dataclass

from paceline.process.lifetime import die_with
from paceline.rpc.addresses import LOOPBACK

RANK_SETTINGS = "PACELINE_REPLICA"
"""Environment variable: RankSettings as a JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank's place in its replica, wherever it runs."""

    rank: int
    size: int
    identity: str
    device: str
    interface: str = LOOPBACK
    """Network interface towards the other ranks."""
    host: str = ""
    """Address for ranks of other replicas; empty: the one of rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings(RankPlace):
    """Settings for a rank that rank 0 starts."""

    port: int
    parent: int
    link: int
    """Descriptor of the socket to rank 0."""
    threads: int
    config: str
    """JSON that is not in the store: every user of the machine could read and change it there."""


def die_with_parent() -> RankSettings:
    """First call of a rank above 0, before it imports torch: from here on the kernel kills this
    process when rank 0 ends, however it ends. If it has ended already, this process exits."""
    settings = RankSettings(**json.loads(os.environ[RANK_SETTINGS]))
    die_with(settings.parent)
    # Ctrl-C reaches the whole process group; rank 0 decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return settings
