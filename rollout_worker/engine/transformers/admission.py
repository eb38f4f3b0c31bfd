"""Admission of waiting requests to the batch, at token boundaries."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rollout_worker.engine.transformers.batch import SequenceRow


@dataclass
class Admission:
    """First come, first served, by whole requests, so that a request's samples share one prefill.

    A prefill has a fixed cost. While the batch is nearly full, new requests wait until an eighth of
    the slots is free, or until all of them can join: so each prefill serves many rows.
    """

    slots: int
    cache_tokens: int
    """Tokens that the cache may hold, over all rows at their longest."""
    waiting: int = 0
    _queue: deque[deque[SequenceRow]] = field(default_factory=deque)

    def add(self, rows: list[SequenceRow]) -> None:
        self._queue.append(deque(rows))
        self.waiting += len(rows)

    def remove(self, request_ids: set[str]) -> list[SequenceRow]:
        """Takes the rows of these requests out of the queue."""
        rows = [r for entry in self._queue for r in entry if r.request.request_id in request_ids]
        self._queue = deque(e for e in self._queue if e[0].request.request_id not in request_ids)
        self.waiting -= len(rows)
        return rows

    def take(self, running: int, longest: int) -> list[SequenceRow]:
        """Rows that join a batch of ``running`` rows, whose longest may reach ``longest`` tokens.
        An empty batch gets at least one: the cache holds any one sequence."""
        batch = max(1, self.slots // 8)
        free = self.slots - running
        if not self.waiting or (running and free < min(batch, self.waiting)):
            return []
        taken: list[SequenceRow] = []
        while self._queue and free:
            entry = self._queue[0]
            longest = max(longest, entry[0].longest)
            # Every row of the cache is as long as the longest.
            room = min(free, self.cache_tokens // longest - running - len(taken))
            if room <= 0:
                break
            if len(entry) > room and len(entry) <= batch and (running or taken):
                break
            for _ in range(min(room, len(entry))):
                taken.append(entry.popleft())
                free -= 1
            if not entry:
                self._queue.popleft()
        self.waiting -= len(taken)
        return taken
