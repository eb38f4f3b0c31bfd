"""A model of Redis: the leader's lease and term, the fenced journal, a snapshot, the payloads.

Operations are atomic where the real ones are scripts. Its data survives its process, as an
append-only file does. Requests and replies travel over the network, so an operation whose reply was
lost has still happened.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controller.ledger import events as ev
from controller.simulator.loop import TIMEOUT, Future, Loop, Network, Process

Ref = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """All events of one flush."""

    term: int
    batch: tuple[str, int]
    events: tuple[ev.Event, ...]


class Store:
    def __init__(self, loop: Loop, network: Network, *, fenced: bool = True) -> None:
        self.process = Process(loop, "redis")
        self.network = network
        self.fenced = fenced
        self.holder = ""
        self.expires = 0.0
        self.term = 0
        self.entries: list[Entry] = []
        self.snapshot: tuple[int, str] | None = None
        """(entries it stands for, state as JSON)."""
        self.payloads: set[Ref] = set()
        self.landed: Callable[[Entry], None] = lambda entry: None

    async def call(
        self, client: Process, timeout: float, op: Callable[..., Any], *args: Any
    ) -> Any:
        """The operation's result, or ``TIMEOUT``: then it may have happened or not."""
        future = Future()

        def serve() -> None:
            result = op(*args)
            self.network.send(self.process.name, client, future.set, result)

        self.network.send(client.name, self.process, serve)
        return await client.within(future, timeout)

    # ---- operations -----------------------------------------------------------------------

    def acquire(self, controller_id: str, lease_s: float) -> int:
        """The new term, or 0 where somebody holds the lease."""
        now = self.process.loop.now
        if self.expires > now:
            return 0
        self.holder, self.expires = controller_id, now + lease_s
        self.term += 1
        return self.term

    def renew(self, controller_id: str, term: int, lease_s: float) -> bool:
        if self.holder != controller_id or self.term != term:
            return False
        self.expires = self.process.loop.now + lease_s
        return True

    def append(
        self,
        term: int,
        at: int,
        batch: tuple[str, int],
        lines: list[str],
        payloads: tuple[Ref, ...],
    ) -> str:
        """ok or fenced. ``at``: entries the writer knows of; a repeated batch lands once."""
        if self.fenced and term != self.term:
            return "fenced"
        if self.fenced and at < len(self.entries):
            return "ok" if self.entries[at].batch == batch else "fenced"
        self.payloads.update(payloads)
        entry = Entry(term, batch, tuple(ev.from_json(json.loads(line)) for line in lines))
        self.entries.append(entry)
        self.landed(entry)
        return "ok"

    def read(self) -> tuple[tuple[int, str] | None, list[Entry]]:
        """The snapshot and every entry after it."""
        start = self.snapshot[0] if self.snapshot else 0
        return self.snapshot, self.entries[start:]

    def write_snapshot(self, term: int, at: int, state: str) -> None:
        if term == self.term and (self.snapshot is None or self.snapshot[0] < at):
            self.snapshot = (at, state)

    def list_payloads(self, term: int) -> set[Ref] | None:
        """What is stored; None to a deposed leader, which would take its successor's for orphans."""
        return set(self.payloads) if term == self.term else None

    def delete_payloads(self, refs: list[Ref]) -> None:
        self.payloads.difference_update(refs)


__all__ = ["TIMEOUT", "Entry", "Ref", "Store"]
