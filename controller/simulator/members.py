"""Simulated tensor plane: an epoch of the gradient mesh, and the checkpoints on a shared disk.

A collective completes only if every member takes part, lives, runs and can reach the others. When
a member is lost the first of the others gets an error; the rest may wait for ever (see what gloo
does), until their epoch is called off.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from controller.simulator.virtual_time import settle
from paceline.v1 import worker_pb2

if TYPE_CHECKING:
    from controller.simulator.policy import SimulatedPolicyWorker
    from controller.simulator.world import World

ERROR = "error"


@dataclass(frozen=True, slots=True)
class Weights:
    version: int
    state: str


@dataclass(slots=True)
class Collective:
    """One rendezvous or one all-reduce of an epoch."""

    parts: dict[str, tuple[SimulatedPolicyWorker, asyncio.Future[Any], frozenset[str]]] = field(
        default_factory=dict
    )
    done: bool = False


class SimulatedEpoch:
    def __init__(self, world: World, mesh: worker_pb2.PolicyMesh) -> None:
        self.world = world
        self.mesh = mesh
        self.collectives: dict[tuple[int, int], Collective] = {}
        self.seeds: dict[str, str] = {}

    def join(
        self,
        worker: SimulatedPolicyWorker,
        key: tuple[int, int],
        part: frozenset[str] = frozenset(),
    ) -> asyncio.Future[Any]:
        """Takes part in collective ``key``. The value: ``ERROR``, or the union of all parts."""
        collective = self.collectives.setdefault(key, Collective())
        future = worker.create_future()
        collective.parts[worker.worker_id] = (worker, future, part)
        if len(collective.parts) == len(self.mesh.members):
            delay = 0.02 + self.world.rng.random() * 0.1
            self.world.timeline.after(delay, self._complete, collective)
        else:
            self.world.timeline.after(0.05, self._watch, collective)
        return future

    def seed(self, source_id: str) -> str | None:
        """The source's weights, as they were when the epoch formed; None if the source is gone."""
        source = self.collectives[(-1, 0)].parts[source_id][0]
        return self.seeds.get(source_id) if source.alive else None

    def _complete(self, collective: Collective) -> None:
        workers = [worker for worker, _, _ in collective.parts.values()]
        if not self._healthy(workers):
            self._fail(collective)
            return
        collective.done = True
        for worker in workers:
            if worker.state_version == self.mesh.state_version:
                self.seeds[worker.worker_id] = worker.state
        union = frozenset().union(*(part for _, _, part in collective.parts.values()))
        for worker, future, _ in collective.parts.values():
            # Members may finish one collective unequally: one can still fail after others are done.
            torn = len(workers) > 1 and self.world.rng.random() < self.world.torn
            delay = self.world.rng.random() * 0.02
            worker.call_later(delay, settle, future, ERROR if torn else union)

    def _watch(self, collective: Collective) -> None:
        """Whether someone who waits can see by now that it will not complete."""
        if collective.done:
            return
        if any(self.world.is_gone(m.worker_id, m.incarnation) for m in self.mesh.members):
            self._fail(collective)
        elif any(not f.done() for w, f, _ in collective.parts.values() if w.alive):
            self.world.timeline.after(0.3, self._watch, collective)

    def _fail(self, collective: Collective) -> None:
        collective.done = True
        waiting = [(w, f) for w, f, _ in collective.parts.values() if w.alive and not f.done()]
        for n, (worker, future) in enumerate(waiting):
            if n == 0 or self.world.rng.random() < 0.5:
                worker.call_later(0.03, settle, future, ERROR)

    def _healthy(self, workers: list[SimulatedPolicyWorker]) -> bool:
        connected = self.world.network.connected
        return all(w.alive and not w.stopped for w in workers) and all(
            connected(a.name, b.name) for a in workers for b in workers if a.name < b.name
        )
