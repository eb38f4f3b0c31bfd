"""The leader: an imperative shell around the pure ledger, for as long as it holds the lease.

    handlers ─execute─► ledger ─events─► appender ─flush─► journal (Redis)
    reports  ─observe─► liveness ─tick─► commands ─┘            │ durable
                                                                ├─► replies, long polls (hub)
                                                                ├─► directives (sessions)
                                                                ├─► run files (thread), and from
                                                                │   them sinks; traces (threads)
                                                                └─► payloads that may go, snapshots

Loops, and what ends them:
    append   one flush after the other; ends with Deposed when the fence refuses one
    renew    extends the lease three times in its length; ends with Deposed when it is another's
    tick     asks liveness whom to declare dead; silent while appends do not go through
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from controller.appender import Appender, Batch
from controller.election import Election
from controller.ending import cancel_all
from controller.errors import NotLeading
from controller.hub import SILENT, Hub
from controller.journal import START, Deposed, Journal, Position, Snapshot
from controller.ledger.commands import BeginTerm, Command, Refused, RunFacts, StartRun
from controller.ledger.events import Event, GroupAccepted
from controller.ledger.fleet import Worker
from controller.ledger.views import live_payloads, running_tries
from controller.liveness import Liveness
from controller.messages import directive_of
from controller.outflow import FINISH_S, Outflow
from controller.partials import PartialStore, PartialWork
from controller.payloads import PayloadStore, Ref
from controller.replica import Replica
from controller.rows import Rows
from controller.runfiles import RunFiles
from controller.sessions import Session, Sessions
from controller.validation import GroupLimits
from paceline.autoscale import Proposal
from paceline.config.schema import Config
from paceline.log import event
from paceline.v1 import admin_pb2, worker_pb2

log = logging.getLogger(__name__)

TICK_S = 0.05
MENDING_TICK_S = 0.02
"""While a mesh is to be formed."""
HAND_OVER_S = 0.3
"""How long a leader that leaves waits for a sink in the middle of a write before it lets go."""
ENDS = frozenset({"RunFinished", "RunFailed"})
PATIENCE_S = 2.0
"""How long a request waits for an outage to end before its caller is told to come again."""


@dataclass(slots=True)
class Plant:
    """What a controller has whether it leads or not."""

    config: Config
    run_dir: Path
    controller_id: str
    redis_url: str
    journal: Journal
    election: Election
    payloads: PayloadStore
    partials: PartialStore
    config_digest: str
    config_json: str
    rows: Rows


@dataclass(slots=True)
class _Closing:
    """What a batch does once it is durable."""

    directives: list[tuple[Session, worker_pb2.Directive]]
    obsolete: list[Ref]
    snapshot: dict[str, Any] | None
    last: bool
    """The run has ended with it."""


class Leader:
    """One term. Thrown away with all its memory when the term ends."""

    def __init__(self, plant: Plant, replica: Replica, term: int) -> None:
        config = plant.config
        self.plant = plant
        self.term = term
        self.ledger = replica.ledger
        self.limits = GroupLimits.of(config)
        self.partials = PartialWork(
            plant.partials,
            replica.ledger.state,
            term=term,
            limit_bytes=config.rollout.partial_store_mb << 20,
        )
        self.hub = Hub()
        self.sessions = Sessions(term, self._directive)
        self.liveness = Liveness(config.fleet)
        self.files = RunFiles(plant.run_dir, may_write=lambda: plant.election.holds_lease)
        self.outflow = Outflow(config, plant.run_dir, may_write=lambda: plant.election.holds_lease)
        self._held_lines: list[Batch] | None = []
        """Batches to be written once the lines before them are; None: those are."""
        self.appender = Appender(
            plant.journal,
            term=term,
            at=replica.at,
            on_flush=self._close_batch,
            on_durable=self._batch_durable,
        )
        self._snapshot_at = replica.snapshot_at
        self._events_since_snapshot = 0
        self.proposal: Proposal | None = None
        """What the autoscaler would change."""
        self.provider_trouble = ""
        """What keeps the provider from reaching the desired counts."""
        self._chores: set[asyncio.Task[None]] = set()
        self._ended: Exception | None = None
        self._over = False
        """The end of the run is durable."""
        self._spoilt = asyncio.Event()
        """The ledger in memory is no longer what the journal says."""
        self._at_the_lease = asyncio.Lock()
        self._let_go = False
        """The lease is given up."""
        self._begun = False
        """The run and the term are in the ledger: until then nobody's command may be decided."""

    # ---- what handlers use ----------------------------------------------------------------

    async def execute(self, command: Command) -> Any:
        """Decides ``command`` and returns its reply once all it rests on is durable.

        Raises Refused where the ledger refuses, NotLeading or Deposed where this process no longer
        leads: the caller asks the next leader.
        """
        await self.ready()
        reply = self.decide(command)
        await self.appender.durable()
        return reply

    def decide(self, command: Command) -> Any:
        """The reply, before it may leave: await ``appender.durable()`` first."""
        events, reply = self._apply(command)
        if events:
            self.appender.add(events)
        return reply

    def decide_group(self, command: Command, ref: Ref, payload: bytes) -> Any:
        """As ``decide``, for AcceptGroup: ``payload`` is stored if the group becomes ready."""
        events, reply = self._apply(command)
        if events:
            for decided in events:
                if isinstance(decided, GroupAccepted) and decided.group.task_id == ref[0]:
                    self.appender.add_payload(ref, payload)
            self.appender.add(events)
        return reply

    def _apply(self, command: Command) -> tuple[tuple[Event, ...], Any]:
        """Raises Refused, with nothing changed, or NotLeading.

        A decision that failed halfway has changed what is in memory, and its events will never be in
        the journal: nothing may be decided on that any more. The term ends, and whoever leads next
        reads the journal.
        """
        if self._spoilt.is_set():
            raise NotLeading("stepping down")
        try:
            return self.ledger.execute(command, time.time())
        except Refused:
            raise
        except Exception as error:
            log.exception("a decision failed halfway command=%s", type(command).__name__)
            self._spoilt.set()
            raise NotLeading(f"{type(command).__name__} failed: stepping down") from error

    async def ready(self) -> None:
        """Returns when this leader may decide. Raises NotLeading after a while of waiting."""
        if self.active:
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.appender.flowing()
                while not self.active:
                    if self._ended is not None:
                        raise NotLeading("stepped down")
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise NotLeading(self.appender.trouble or "the leader's lease has run out") from None

    @property
    def active(self) -> bool:
        """Appends go through and the lease is ours by our own clock."""
        return (
            self._begun
            and not self._spoilt.is_set()
            and not self.appender.trouble
            and self._ended is None
            and self.plant.election.holds_lease
        )

    @property
    def version(self) -> int:
        """Newest committed version."""
        return int(self.ledger.state.versions.version)

    @property
    def trouble(self) -> str:
        """Why nothing can be decided now, in words; empty: it can."""
        if self.appender.trouble:
            return self.appender.trouble
        return "" if self.plant.election.holds_lease else "waiting for the lease"

    def describe(self, worker: Worker, status: admin_pb2.WorkerStatus) -> None:
        """Adds what only the leader knows of a living worker: its heartbeat and what it said."""
        key = (worker.worker_id, worker.incarnation)
        status.heartbeat_age_s = self.liveness.age(*key, time.monotonic())
        if self.liveness.suspect(*key):
            status.state = "suspect"
        session = self.sessions.of(*key)
        if session is not None:
            status.activity = session.report.activity
            for name, value in session.report.gauges.items():
                status.gauges[name] = value

    # ---- the term -------------------------------------------------------------------------

    async def run(self) -> None:
        """Leads until deposed (raises Deposed) or cancelled (hands the lease over)."""
        self.appender_task = asyncio.create_task(self.appender.run(), name="append")
        loops = [
            self.appender_task,
            asyncio.create_task(self._renew(), name="renew"),
            asyncio.create_task(self._begin(), name="begin"),
            asyncio.create_task(self._end_when_spoilt(), name="spoilt"),
        ]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except NotLeading as why:
            # A decision of this leader's own failed halfway: no reason to end the process.
            raise Deposed(str(why)) from why
        except asyncio.CancelledError:
            await self._hand_over()
            raise
        finally:
            await self._end(loops)

    async def _end_when_spoilt(self) -> None:
        await self._spoilt.wait()
        raise Deposed("a decision failed halfway: the ledger is read again")

    async def _begin(self) -> None:
        before = self.appender.at
        self._over = self.ledger.state.ended
        facts = self._facts()
        self.decide(StartRun(facts))
        self.decide(BeginTerm(self.term, self.plant.controller_id))
        self._begun = True
        now = time.monotonic()
        self.liveness.begin(self.ledger, now)
        await self.appender.durable()
        event(
            log,
            "leading",
            term=self.term,
            at=self.appender.at.entry,
            step=self.ledger.state.versions.step,
        )
        self.outflow.start(self.ledger.state.started_t)
        self._chore(self._write_missing_lines(before))
        self._chore(self.outflow.replay(self.plant.journal, before.entry))
        self._chore(self._sweep_orphans())
        self._chore(self.partials.begin())
        await self._tick()

    def _facts(self) -> RunFacts:
        config, rows = self.plant.config, self.plant.rows
        return RunFacts(
            run_id=config.run.name,
            run_name=config.run.name,
            seed=config.run.seed,
            steps=config.train.steps,
            groups_per_step=config.train.groups_per_step,
            group_size=config.rollout.group_size,
            max_staleness=config.train.max_staleness,
            max_attempts=config.fleet.max_attempts,
            dataset_rows=rows.train_rows,
            eval_rows=rows.eval_rows,
            eval_every=config.train.eval_every,
            checkpoint_every=config.train.checkpoint_every,
            filter_uninformative=config.train.filter_uninformative,
            shuffle=config.data.shuffle,
            desired={"policy": config.fleet.policy, "rollout": config.fleet.rollout},
            data_digest=rows.digest,
            config_digest=self.plant.config_digest,
            bounds=config.fleet.bounds,
            speculative_after=config.rollout.speculative_after if config.rollout.speculative else 0,
        )

    async def _renew(self) -> None:
        lease_s = self.plant.config.controller.leader_lease_s
        lapsed = False
        while True:
            await asyncio.sleep(lease_s / 4)
            try:
                async with asyncio.timeout(lease_s), self._at_the_lease:
                    if self._let_go:
                        return
                    if not await self.plant.election.renew(self.term):
                        raise Deposed("the lease is another controller's")
            except (RedisError, OSError, TimeoutError) as error:
                if not self.plant.election.holds_lease and not lapsed:
                    lapsed = True
                    event(log, "lease lapsed", why=type(error).__name__, level=logging.WARNING)
                    # Workers must not hang on a controller that may already be succeeded.
                    self.sessions.close_all()
                    self.hub.wake_all()
                continue
            if lapsed:
                lapsed = False
                event(log, "lease regained", term=self.term)
                # Their silence was ours: everyone gets the full time again.
                self.liveness.begin(self.ledger, time.monotonic())

    async def _tick(self) -> None:
        while True:
            mesh = self.ledger.state.fleet.mesh
            mending = mesh is not None and mesh.broken
            await asyncio.sleep(MENDING_TICK_S if mending else TICK_S)
            if not self.active:
                continue
            for command in self.liveness.tick(self.ledger, time.monotonic()):
                event(log, "liveness", command=command)
                try:
                    self.decide(command)
                except Refused as refusal:
                    # Overtaken by a request since the evidence was looked at.
                    event(log, "liveness overtaken", why=str(refusal), level=logging.WARNING)

    async def _hand_over(self) -> None:
        """A wanted end: what was decided is made durable, then a standby may take over at once."""
        try:
            async with asyncio.timeout(1.0):
                await self.appender.durable()
                # The next leader goes on after the last line, so there must be one by then.
                await asyncio.to_thread(self.files.close)
                self.outflow.begin_close(self._outcome)
                await asyncio.to_thread(self.outflow.join, HAND_OVER_S)
                async with self._at_the_lease:
                    # A renewal that came after it would take the lease again, for nobody.
                    self._let_go = True
                    await self.plant.election.release()
        except (RedisError, OSError, TimeoutError) as error:
            event(log, "lease not released", why=type(error).__name__, level=logging.WARNING)
        if self._outcome is not None:
            await asyncio.to_thread(self.outflow.join, FINISH_S)

    @property
    def _outcome(self) -> str | None:
        """finished or failed; None: the run goes on."""
        state = self.ledger.state
        return str(state.phase) if state.ended else None

    async def _end(self, loops: Sequence[asyncio.Task[Any]]) -> None:
        self._ended = NotLeading("stepped down")
        await cancel_all([*loops, *self._chores])
        self.appender.abandon(self._ended)
        self.sessions.close_all()
        self.hub.wake_all()
        self.outflow.begin_close(None)
        await asyncio.to_thread(self.files.close)

    # ---- a batch's way --------------------------------------------------------------------

    def _close_batch(self, batch: Batch) -> _Closing:
        """The ledger stands exactly at the batch's end: what depends on that is taken now."""
        kinds = {type(e).__name__ for e in batch.events}
        directives = [] if kinds <= SILENT else self.sessions.collect()
        obsolete = self.ledger.take_garbage()
        self._events_since_snapshot += len(batch.events)
        snapshot = None
        if self._events_since_snapshot >= self.plant.config.controller.snapshot_every:
            self._events_since_snapshot = 0
            snapshot = self.ledger.to_snapshot()
        return _Closing(directives, obsolete, snapshot, last=not kinds.isdisjoint(ENDS))

    def _batch_durable(self, batch: Batch) -> None:
        closing: _Closing = batch.attachment
        self.hub.announce(batch.json)
        self.sessions.deliver(closing.directives)
        if self._held_lines is None:
            self.files.record(batch.at.entry, batch.t, batch.json)
        else:
            self._held_lines.append(batch)
        self.outflow.record(batch.t, batch.json)
        if closing.last:
            self._over = True
            self._chore(self._finish_outflow())
        if closing.obsolete:
            self._chore(self._delete_payloads(closing.obsolete))
        if finished := self.partials.finished(batch.events):
            self._chore(self.partials.delete(finished))
        if closing.snapshot is not None:
            self._chore(self._save_snapshot(Snapshot(batch.at, closing.snapshot, batch.t)))

    def _directive(self, session: Session) -> worker_pb2.Directive:
        return directive_of(
            self.ledger.state, session.worker_id, session.incarnation, session.report
        )

    # ---- chores ---------------------------------------------------------------------------

    def _chore(self, coro: Any) -> None:
        task = asyncio.create_task(coro)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def _save_snapshot(self, snapshot: Snapshot) -> None:
        try:
            await self.plant.journal.save_snapshot(
                snapshot, term=self.term, trim_before=self._snapshot_at
            )
        except (RedisError, OSError, Deposed) as error:
            # Only replay gets longer; the next one is due in as many events.
            event(log, "snapshot not saved", why=str(error), level=logging.WARNING)
            return
        self._snapshot_at = snapshot.at.entry
        event(log, "snapshot", at=snapshot.at.entry, entries=snapshot.at.number)

    async def _delete_payloads(self, refs: list[Ref]) -> None:
        try:
            await self.plant.payloads.delete(refs)
        except (RedisError, OSError) as error:
            # The next leader sweeps what is left.
            event(log, "payloads not deleted", why=str(error), level=logging.WARNING)

    async def _write_missing_lines(self, end: Position) -> None:
        """First what earlier leaders journalled and did not write, then what waited meanwhile."""
        position = await self.files.opened() or START
        try:
            while entries := await self.plant.journal.scan(position, until=end.entry):
                for entry in entries:
                    self.files.record(entry.at.entry, entry.t, entry.events)
                position = entries[-1].at.entry
        except (RedisError, OSError) as error:
            event(log, "run files have a gap", why=str(error), level=logging.WARNING)
        held, self._held_lines = self._held_lines or [], None
        for batch in held:
            self.files.record(batch.at.entry, batch.t, batch.json)
        if self._over:
            await self._finish_outflow()

    async def _finish_outflow(self) -> None:
        """The run is over: sinks are closed as soon as they have its last lines."""
        if self._held_lines is None:
            await self.files.written()
            self.outflow.begin_close(self._outcome)

    async def _sweep_orphans(self) -> None:
        """Payloads that no accepted group needs: left by a leader that died before deleting them."""
        try:
            found = await self.plant.payloads.list()
        except (RedisError, OSError):
            return
        # Looked up now and not before the listing: what came in meanwhile is known by now.
        needed = live_payloads(self.ledger.state)
        # A group under way may have been stored by the leader before, and be handed in again any time.
        expected = running_tries(self.ledger.state)
        orphans = [ref for ref in found if ref not in needed and ref not in expected]
        if not orphans:
            return
        try:
            # What the ledger says must be durable, and no successor may have accepted groups since
            # the listing: a leader that was stopped in between would delete what they need.
            await self.appender.durable()
            if not await self.plant.election.renew(self.term):
                return
        except (RedisError, OSError, NotLeading, Deposed):
            return
        await self._delete_payloads(orphans)
        event(log, "orphaned payloads deleted", count=len(orphans))
