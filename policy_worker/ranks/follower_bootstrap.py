"""A follower's tie to the leader that spawned it. Imports nothing slow: it is to hold from the start."""

from __future__ import annotations

import json
import os
import signal

from paceline.process.parent_death_signal import die_with

RANK_SETTINGS = "PACELINE_REPLICA"
"""Environment variable: JSON object in which the leader tells a follower who it is."""


def die_with_parent() -> int:
    """First thing a follower does, before it imports torch. Returns its rank.

    From here on the kernel kills this process when the leader ends, however it ends; where it has
    ended already, this process exits.
    """
    settings = json.loads(os.environ[RANK_SETTINGS])
    die_with(settings["parent"])
    # Ctrl-C reaches the whole process group; when to stop is the leader's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank: int = settings["rank"]
    return rank
