"""Number of tasks to lease, so that the engine never waits for work and the worker hoards none."""

from __future__ import annotations

import math

LEAST_AHEAD_S = 0.05
"""Least time that queued work must last: a lease call, a submit call and some scheduling."""


def tasks_wanted(
    *,
    slots: int,
    group_size: int,
    generating: int,
    sequences_per_s: float,
    round_trip_s: float,
    unsent: int,
) -> int:
    """Tasks to ask for; 0: enough is at hand.

    ``generating``: unfinished sequences; ``sequences_per_s``: measured, 0 while unknown;
    ``round_trip_s``: of a lease call that found tasks; ``unsent``: groups the controller has not taken
    yet. Besides the slots, work for two round trips is queued. A small shortfall of the queue may
    grow, because one call for several tasks costs as much as one for one; a free slot is filled.
    """
    ahead_s = max(2 * round_trip_s, LEAST_AHEAD_S)
    ahead = min(max(slots // 8, math.ceil(sequences_per_s * ahead_s)), slots)
    target = slots + ahead
    if unsent * group_size > 2 * target:
        # The controller takes no groups: more work would only pile up.
        return 0
    short = target - generating
    if short <= 0 or (generating >= slots and short < max(group_size, ahead // 2)):
        return 0
    return min(math.ceil(short / group_size), 256)
