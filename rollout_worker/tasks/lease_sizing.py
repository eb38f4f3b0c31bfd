"""How many tasks to lease now, so that the engine never waits for work and hoards none."""

from __future__ import annotations

import math

LEAST_AHEAD_S = 0.05
"""Work kept ready for at least this long: a lease call, a submit call and some scheduling."""


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

    ``generating``: sequences held and not finished, wherever their groups stand; ``sequences_per_s``: measured, 0 while unknown;
    ``round_trip_s``: of a lease call that found tasks; ``unsent``: groups the controller has not
    taken yet. Above the slots, work for two round trips is kept waiting. Of that, small shortfalls are
    left to gather: one call for several tasks costs as much as one for one. A free slot is not.
    """
    ahead_s = max(2 * round_trip_s, LEAST_AHEAD_S)
    ahead = min(max(slots // 8, math.ceil(sequences_per_s * ahead_s)), slots)
    target = slots + ahead
    if unsent * group_size > 2 * target:
        # The controller takes nothing: more work would only pile up.
        return 0
    short = target - generating
    if short <= 0 or (generating >= slots and short < max(group_size, ahead // 2)):
        return 0
    return min(math.ceil(short / group_size), 256)
