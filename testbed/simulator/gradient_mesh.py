"""Simulated gradient mesh: the collectives of one epoch.

A collective completes only if every member takes part, lives, runs and can reach the others. When
a member is lost the first of the others gets an error; the rest may wait for ever (see what gloo
does), until their epoch is called off.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.v1 import worker_pb2
from testbed.simulator.virtual_time import Network, Process, settle

ERROR = "error"
RENDEZVOUS = (-1, 0)


@dataclass(frozen=True, slots=True)
class Weights:
    version: int
    state: str
    origin: tuple[str, int] = field(default=("", 0), compare=False)
    """Replica that published them: name and incarnation."""


@dataclass(slots=True)
class Collective:
    """One rendezvous or one all-reduce of an epoch."""

    parts: dict[Process, tuple[asyncio.Future[Any], frozenset[str]]] = field(default_factory=dict)
    done: bool = False

    def waiting(self) -> list[tuple[Process, asyncio.Future[Any]]]:
        return [
            (w, future) for w, (future, _) in self.parts.items() if w.alive and not future.done()
        ]


@dataclass
class SimulatedEpoch:
    network: Network
    mesh: worker_pb2.PolicyMesh
    is_gone: Callable[[str, int], bool]
    collectives: dict[tuple[int, int], Collective] = field(default_factory=dict)
    weights: dict[str, tuple[Process, Weights]] = field(default_factory=dict)
    """Contribution of each member, as it came to the rendezvous."""

    def meet(self, worker: Process, weights: Weights) -> asyncio.Future[Any]:
        """Takes part in the rendezvous."""
        self.weights[worker.name] = worker, weights
        return self.join(worker, RENDEZVOUS)

    def join(
        self, worker: Process, key: tuple[int, int], part: frozenset[str] = frozenset()
    ) -> asyncio.Future[Any]:
        """Takes part in collective ``key``. The value: ``ERROR``, or the union of all parts."""
        collective = self.collectives.setdefault(key, Collective())
        future = worker.create_future()
        collective.parts[worker] = (future, part)
        after = self.network.timeline.after
        if len(collective.parts) == len(self.mesh.members):
            after(0.02 + self.network.rng.random() * 0.1, self._complete, collective)
        else:
            after(0.05, self._watch, collective)
        return future

    def transferred(self, source_id: str) -> str | None:
        """The source's weights, as they were when the epoch formed; None if the source is gone."""
        source, weights = self.weights[source_id]
        return weights.state if source.alive else None

    def _complete(self, collective: Collective) -> None:
        if not self._healthy(list(collective.parts)):
            self._fail(collective)
            return
        collective.done = True
        rng = self.network.rng
        union = frozenset().union(*(part for _, part in collective.parts.values()))
        for worker, (future, _) in collective.parts.items():
            # Members may finish one collective unequally: one can still fail after others are done.
            torn = len(collective.parts) > 1 and rng.random() < self.network.torn
            delay = rng.random() * 0.02
            worker.call_later(delay, settle, future, ERROR if torn else union)

    def _watch(self, collective: Collective) -> None:
        """True if someone who waits can see by now that it will not complete."""
        if collective.done:
            return
        if any(self.is_gone(m.worker_id, m.incarnation) for m in self.mesh.members):
            self._fail(collective)
        elif collective.waiting():
            self.network.timeline.after(0.3, self._watch, collective)

    def _fail(self, collective: Collective) -> None:
        collective.done = True
        for n, (worker, future) in enumerate(collective.waiting()):
            if n == 0 or self.network.rng.random() < 0.5:
                worker.call_later(0.03, settle, future, ERROR)

    def _healthy(self, workers: list[Process]) -> bool:
        connected = self.network.connected
        return all(w.alive and not w.stopped for w in workers) and all(
            connected(a.name, b.name) for a in workers for b in workers if a.name < b.name
        )
