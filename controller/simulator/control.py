"""A model of the shell around the real ledger: election, appends, sessions, ticks.

It does what a controller must, in the simplest way: one append under way at a time, replies and
directives only once everything decided before them is durable.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from controller.fleet.liveness import Liveness
from controller.ledger import Ledger, views
from controller.ledger import commands as cmd
from controller.ledger import events as ev
from controller.ledger.enums import Lifecycle
from controller.simulator.loop import TIMEOUT, Process
from controller.simulator.oracle import Violation
from controller.simulator.store import Ref
from paceline.ids import MeshEpoch, TaskId, Version

if TYPE_CHECKING:
    from controller.simulator.worker import SimulatedWorker
    from controller.simulator.world import World

Respond = Callable[[tuple[Any, ...]], None]


@dataclass(frozen=True, slots=True)
class Query:
    """A question that changes nothing: the plan of a replica."""

    worker_id: str
    incarnation: int
    mesh_epoch: int
    state_version: int


@dataclass(frozen=True, slots=True)
class LeaseRef:
    task_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Who:
    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Report:
    caller: Who
    lifecycle: str
    progress: int
    busy: bool
    held_leases: tuple[LeaseRef, ...]
    state_version: int
    loaded_version: int


@dataclass(slots=True)
class Batch:
    lines: list[str] = field(default_factory=list)
    payloads: list[Ref] = field(default_factory=list)
    garbage: list[Ref] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    loud: bool = False
    """Directives may have changed."""


@dataclass(slots=True)
class Session:
    worker: SimulatedWorker
    incarnation: int
    held: tuple[views.Ref, ...] = ()
    sent: views.DirectiveView | None = None


class Controller(Process):
    LEASE_S = 1.0

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.loop, name)
        self.world = world
        self.skew = world.rng.uniform(-1.0, 1.0)
        self.term = 0
        self.lease_until = 0.0
        self.ledger: Ledger | None = None
        self.spawn(self._stand_by())

    @property
    def leads(self) -> bool:
        return self.ledger is not None and self.loop.now < self.lease_until

    # ---- election -------------------------------------------------------------------------

    async def _stand_by(self) -> None:
        store = self.world.store
        while True:
            asked = self.loop.now
            term = await store.call(self, 0.5, store.acquire, self.name, self.LEASE_S)
            if term is TIMEOUT or term == 0:
                await self.sleep(0.1 + self.world.rng.random() * 0.2)
                continue
            self.term, self.lease_until = term, asked + self.LEASE_S
            read = await store.call(self, 0.5, store.read)
            if read is not TIMEOUT:
                await self._lead(*read)

    async def _lead(self, snapshot: tuple[int, str] | None, entries: list[Any]) -> None:
        world = self.world
        self.ledger = ledger = self._replay(snapshot, entries)
        self.at = (snapshot[0] if snapshot else 0) + len(entries)
        self.liveness = Liveness(world.limits)
        self.sessions: dict[str, Session] = {}
        self.open = Batch()
        self.inflight: Batch | None = None
        self.batches = 0
        self.seq = 0
        self.decide(cmd.StartRun(world.facts))
        try:
            self.decide(cmd.BeginTerm(self.term, self.name))
        except cmd.CommandRefused:  # succeeded before it had read the journal
            self.step_down()
            return
        self.liveness.begin(ledger, self.loop.now)
        self.spawn(self._tick(self.term))
        self.spawn(self._sweep(self.term))
        term, store = self.term, world.store
        while self.ledger is not None and self.term == term:
            await self.sleep(self.LEASE_S / 4)
            asked = self.loop.now
            renewed = await store.call(
                self, self.LEASE_S / 2, store.renew, self.name, term, self.LEASE_S
            )
            if renewed is False:
                self.step_down()
            elif renewed is not TIMEOUT:
                if self.loop.now >= self.lease_until and self.ledger is not None:
                    self.liveness.begin(self.ledger, self.loop.now)
                self.lease_until = asked + self.LEASE_S

    def _replay(self, snapshot: tuple[int, str] | None, entries: list[Any]) -> Ledger:
        ledger = Ledger.from_snapshot(json.loads(snapshot[1])) if snapshot else Ledger()
        for entry in entries:
            for event in entry.events:
                ledger.apply(event)
        ledger.take_garbage()
        expected = self.world.oracle.ledger
        up_to_date = len(entries) + (snapshot[0] if snapshot else 0) == len(
            self.world.store.entries
        )
        if up_to_date and ledger.fingerprint() != expected.fingerprint():
            raise Violation(f"{self.name}: the replayed state differs from the journal's")
        return ledger

    def step_down(self) -> None:
        """Another leads: what was not durable never was."""
        self.ledger = None
        self.lease_until = 0.0
        self.sessions = {}

    async def _tick(self, term: int) -> None:
        while self.ledger is not None and self.term == term:
            if self.leads:
                for command in self.liveness.tick(self.ledger, self.loop.now):
                    self.decide(command)
            await self.sleep(0.15)

    async def _sweep(self, term: int) -> None:
        """Deletes payloads that an earlier leader did not get round to."""
        store = self.world.store
        await self.sleep(self.world.rng.uniform(0.0, 2.0))
        stored = await store.call(self, 0.5, store.list_payloads, term)
        if stored is TIMEOUT or stored is None or self.ledger is None or self.term != term:
            return
        orphans = sorted(stored - views.live_payloads(self.ledger.state))
        # What memory says is not needed may rest on a checkpoint that is not durable yet.
        self._when_durable(lambda: self.spawn(self._delete(orphans)))

    # ---- deciding and appending -----------------------------------------------------------

    def decide(self, command: cmd.Command) -> Any:
        assert self.ledger is not None
        events, reply = self.ledger.execute(command, 1.7e9 + self.loop.now + self.skew)
        batch = self.open
        for event in events:
            batch.lines.append(json.dumps(ev.to_json(event)))
            batch.loud = batch.loud or event.directs or isinstance(event, ev.WorkerChanged)
            if isinstance(event, ev.GroupAccepted):
                batch.payloads.append((event.group.task_id, event.group.attempt))
        batch.garbage.extend(self.ledger.take_garbage())
        if events and self.inflight is None:
            self._flush()
        return reply

    def _when_durable(self, then: Callable[[], None]) -> None:
        if self.open.lines:
            self.open.then.append(then)
        elif self.inflight is not None:
            self.inflight.then.append(then)
        else:
            then()

    def _flush(self) -> None:
        batch, self.open = self.open, Batch()
        self.inflight = batch
        self.batches += 1
        self.spawn(self._append(self.term, (f"{self.name}/{self.term}", self.batches), batch))

    async def _append(self, term: int, batch_id: tuple[str, int], batch: Batch) -> None:
        store = self.world.store
        while True:
            args = (term, self.at, batch_id, batch.lines, tuple(batch.payloads))
            result = await store.call(self, 0.4, store.append, *args)
            if self.ledger is None or self.term != term:
                return
            if result == "fenced":
                self.step_down()
                return
            if result is not TIMEOUT:
                break
        self.inflight = None
        self.at += 1
        for then in batch.then:
            then()
        if self.ledger is None:
            return
        if batch.garbage:
            self.spawn(self._delete(batch.garbage))
        if self.open.lines:
            self.open.loud = self.open.loud or batch.loud
            self._flush()
        else:
            self._compare()
            if batch.loud:
                for session in self.sessions.values():
                    self._direct(session)

    def _compare(self) -> None:
        """Everything decided is durable: the leader's memory is what the journal says."""
        store, ledger = self.world.store, self.ledger
        assert ledger is not None
        if store.term != self.term or self.world.rng.random() > 0.1:
            return
        if ledger.fingerprint() != self.world.oracle.ledger.fingerprint():
            raise Violation(f"{self.name}: its memory differs from the journal")
        if self.world.rng.random() < 0.3:
            state = json.dumps(ledger.to_snapshot())
            store.write_snapshot(self.term, len(store.entries), state)

    async def _delete(self, garbage: list[Ref]) -> None:
        store = self.world.store
        await store.call(self, 0.5, store.delete_payloads, garbage)

    # ---- requests -------------------------------------------------------------------------

    def request(self, command: Any, respond: Respond) -> None:
        if not self.leads:
            respond(("not_leader", self.world.store.holder))
            return
        assert self.ledger is not None
        if not isinstance(command, cmd.Scale | cmd.Drain | cmd.Pause | cmd.Stop | cmd.DeclareDead):
            self.liveness.heard(command.worker_id, command.incarnation, self.loop.now)
        if isinstance(command, Query):
            plan = views.plan(
                self.ledger.state,
                command.worker_id,
                command.incarnation,
                MeshEpoch(command.mesh_epoch),
                Version(command.state_version),
            )
            self._when_durable(lambda: respond(("ok", plan)))
            return
        if isinstance(command, cmd.BreakMesh):
            who = (command.worker_id, command.incarnation)
            self.liveness.peer_error(*who, command.epoch, self.loop.now)
        try:
            reply = self.decide(command)
        except cmd.CommandRefused as refused:
            answer = ("refused", refused.code, str(refused))
            self._when_durable(lambda: respond(answer))
            return

        def leave() -> None:
            self.world.oracle.replied(command, reply)
            respond(("ok", reply))

        self._when_durable(leave)

    # ---- sessions -------------------------------------------------------------------------

    def report(self, worker: SimulatedWorker, report: Report) -> None:
        if not self.leads:
            return
        assert self.ledger is not None
        who = report.caller
        session = self.sessions.get(who.worker_id)
        if session is None or session.incarnation != who.incarnation:
            session = self.sessions[who.worker_id] = Session(worker, who.incarnation)
        session.held = tuple((TaskId(r.task_id), r.attempt) for r in report.held_leases)
        session.sent = None
        if self.ledger.state.fleet.current(who.worker_id, who.incarnation) is not None:
            self.liveness.observe(report, self.loop.now)
            self.decide(
                cmd.Observe(
                    who.worker_id,
                    who.incarnation,
                    Lifecycle(report.lifecycle),
                    Version(report.state_version),
                    Version(report.loaded_version),
                )
            )
        live = session
        self._when_durable(lambda: self._direct(live))

    def session_lost(self, worker_id: str, incarnation: int) -> None:
        session = self.sessions.get(worker_id) if self.ledger is not None else None
        if session is not None and session.incarnation == incarnation:
            del self.sessions[worker_id]
            self.liveness.session_lost(worker_id, incarnation, self.loop.now)

    def _direct(self, session: Session) -> None:
        """Sends the worker what should be true of it, if that is not what it was sent last."""
        if self.ledger is None or self.open.lines or self.inflight is not None:
            return  # the directive follows when what it rests on is durable
        worker = session.worker
        view = views.directive(
            self.ledger.state, worker.worker_id, session.incarnation, session.held
        )
        if view == session.sent:
            return
        session.sent = view
        self.seq += 1
        self.world.network.send(
            self.name, worker, worker.directed, session.incarnation, (self.term, self.seq), view
        )
