"""Swim lanes of the last minutes: what each process did in each of a few hundred cells of time."""

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from paceline.observe.timeline import (
    BUSY,
    LEADER,
    PROCESS,
    ROLES,
    RUN,
    SEATS,
    STEPS,
    WORK,
    Item,
    Mark,
    Slice,
    Timeline,
)

MOST = 40_000
"""Slices and marks that are kept: those of ten minutes, at 1,000 workers that turn from waiting to
generating twice a minute."""
MOST_COMMITS = 500
LEAST_S = 10.0
"""Lanes are at least so long."""
KINDS = "compute reduce commit generate wait open start down lead run"
CODES = dict(zip(KINDS.split(), "crmgwosdl.", strict=True))
"""Letters of kinds of slices in the cells of a lane; a space: nothing is known."""


class SwimLanes:
    """Keeps what the lanes show. Not thread-safe."""

    def __init__(self) -> None:
        self.timeline = Timeline(self._keep, groups=False)
        self._items: deque[tuple[float, Slice | Mark]] = deque(maxlen=MOST)
        """Each with the time of the event that completed it: they rise."""

    def _keep(self, item: Item) -> None:
        if isinstance(item, Mark) or (isinstance(item, Slice) and _is_shown(item)):
            self._items.append((self.timeline.t, item))

    def window(self, now: float, seconds: float, cells: int) -> dict[str, Any]:
        """The lanes of the last ``seconds`` before ``now`` (Unix seconds), or of all that is known
        if that is less: see docs/rest.md."""
        since = now - seconds
        # Others are by a clock that was set back.
        items = [item for item in self._since(since, now) if _begin(item) < now]
        begun = min(map(_begin, items), default=since)
        since = max(since, min(begun, now - LEAST_S))
        found: dict[str, list[Slice]] = defaultdict(list)
        marks, commits = [], []
        for item in items:
            if isinstance(item, Mark):
                marks.append(item)
            elif item.row == STEPS:
                commits.append(item.end)
            else:
                found[item.row if item.lane == SEATS else item.lane].append(item)
        lanes = [self._lane(name, found[name], since, now, cells) for name in found]
        lanes.sort(key=lambda lane: (ROLES.index(lane["role"]), _natural(lane["name"])))
        return {
            "since": since,
            "until": now,
            "lanes": lanes,
            "marks": [
                {"t": m.t, "lane": m.lane, "text": m.text, "severity": m.severity}
                for m in sorted(marks, key=lambda mark: mark.t)
            ],
            "commits": sorted(commits)[-MOST_COMMITS:],
        }

    def _since(self, since: float, now: float) -> Iterator[Slice | Mark]:
        for completed, item in reversed(self._items):
            if completed < since:
                break
            if (item.t if isinstance(item, Mark) else item.end) >= since:
                yield item
        for s in self.timeline.open():
            if s.row != STEPS and _is_shown(s):
                yield s._replace(end=now)

    def _lane(
        self, name: str, slices: list[Slice], since: float, now: float, cells: int
    ) -> dict[str, Any]:
        """``busy``: share of the known time; None: the process does nothing that is known."""
        painted, width = bytearray(b" " * cells), (now - since) / cells
        busy = known = 0.0
        waits: dict[str, float] = defaultdict(float)
        # What a process does is painted over the life that it has.
        for s in sorted(slices, key=lambda s: (s.row != PROCESS, s.start)):
            start, end = max(s.start, since), min(s.end, now)
            code = CODES[self._seat_kind(s) if s.lane == SEATS else s.kind].encode()
            first, last = round((start - since) / width), round((end - since) / width)
            if first == last < cells and painted[first : first + 1] in b" .":
                last += 1  # Too short for a cell, in one that has nothing else
            painted[first:last] = code * (min(last, cells) - first)
            if s.row == WORK and s.kind != "open":
                known += end - start
                busy += (end - start) * (s.kind in BUSY)
                waits[s.owner] += (end - start) * (s.kind == "wait")
        longest = sorted(waits.items(), key=lambda wait: -wait[1])[:3]
        seat = slices[0].lane == SEATS
        return {
            "name": name,
            "role": SEATS if seat else self.timeline.roles.get(name, RUN),
            "cells": painted.decode(),
            "busy": round(busy / known, 4) if known else None,
            "waits": {owner: round(s, 3) for owner, s in longest if owner and s},
        }

    def _seat_kind(self, held: Slice) -> str:
        return {"policy": "compute", "rollout": "generate"}.get(
            self.timeline.roles.get(held.name, ""), "run"
        )


def _begin(item: Slice | Mark) -> float:
    return item.t if isinstance(item, Mark) else item.start


def _is_shown(item: Slice) -> bool:
    return item.lane == SEATS or item.row in (PROCESS, WORK, LEADER, STEPS)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key by which policy-10 comes after policy-9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
