"""The leader: applies requests to the ledger, journals the events, replies once they are durable.

    handlers ─execute─► ledger ─events─► group commit ─flush─► journal (Redis)
    reports  ─observe─► liveness ─tick─► commands ─┘            │ durable
                                                                ├─► replies, long polls
                                                                ├─► directives (sessions)
                                                                ├─► projection, and from it alerts
                                                                ├─► run files, sinks (threads)
                                                                └─► payloads that may go, snapshots

Loops, and what ends them:
    append   one flush after the other; ends with Deposed when the fence refuses one
    renew    extends the lease three times in its length; ends with Deposed when it is another's
    begin    journals the term, then ticks: asks liveness whom to declare dead; silent while appends
             do not go through
    spoilt   waits for a decision that failed halfway; ends with Deposed
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from redis.exceptions import RedisError

from controller.context import ControllerContext, RunSettings
from controller.dataset_rows import DatasetRows
from controller.fleet.autoscale_policy import Proposal
from controller.fleet.flow_fractions import FlowAverage
from controller.fleet.liveness import Liveness
from controller.fleet.sessions import ServerSession, Sessions
from controller.housekeeping import Housekeeping
from controller.ledger import decisions as cmd
from controller.ledger.decisions.commands import Command, CommandRefused
from controller.ledger.events import Event, RunFailed, RunFinished, StepCommitted
from controller.ledger.state.fleet import Worker
from controller.ledger.views import may_need
from controller.runtime import LongPolls, NotLeading, cancel_all
from controller.store.group_commit import GroupCommit
from controller.store.journal import Deposed, Entry, LedgerSnapshot
from controller.store.ledger_follower import LedgerFollower
from paceline.payloads.group_limits import GroupLimits, Invalid
from paceline.payloads.store import Ref
from paceline.process.structured_log import event
from paceline.redis.client import front_port, log_fields, trouble_of
from paceline.v1 import admin_pb2, worker_pb2

log = logging.getLogger(__name__)
R = TypeVar("R")

MENDING_TICK_S = 0.02  # While a mesh is to be formed
TERM_AHEAD_S = 86_400.0
"""Terms are milliseconds of Redis's clock, which may be this far ahead of the leader's."""
PATIENCE_S = 2.0
"""How long a request waits for an outage to end before its caller is told to come again."""


class Leader:
    """One term. Thrown away with all its memory when the term ends."""

    def __init__(
        self, context: ControllerContext, rows: DatasetRows, replica: LedgerFollower, term: int
    ) -> None:
        config, stores = context.config, context.stores
        self.context = context
        self.rows = rows
        self.election = stores.election
        self.clock = context.clock
        self.term = term
        self.ledger = replica.ledger
        self.settings = RunSettings(context, lambda: self.ledger.state)
        self.limits = GroupLimits.of(config)
        self.long_polls = LongPolls()
        port = front_port(context.stores.worker_url)
        self.sessions = Sessions(term, self.ledger, port)
        self.last_reports: dict[tuple[str, int], worker_pb2.Report] = {}
        """Last reports of living workers whose session has ended, by (worker id, incarnation)."""
        self.liveness = Liveness(config.fleet)
        self.group_commit = GroupCommit(
            stores.journal, replica, term=term, on_flush=self._close_batch, clock=context.clock
        )
        self.housekeeping = Housekeeping(
            context, term, self.ledger, self.group_commit, replica.snapshot_at
        )
        self._lapse = ""  # reason why the lease cannot be renewed now
        self.flow = FlowAverage()
        """How the rollout workers spend their time; filled by the autoscaler's loop."""
        self.proposal: Proposal | None = None  # Change that the autoscaler would make
        self.provider_trouble = ""
        """Trouble that keeps the provider from reaching the desired counts."""
        self._ended: Exception | None = None
        self._spoilt = asyncio.Event()  # This term is over: ``_spoilt_by`` says why
        self._spoilt_by = ""
        self._begun = False
        """The run and the term are in the ledger: until then nobody's command may be decided."""

    # ---- what handlers use ----------------------------------------------------------------

    async def execute(self, command: Command[R]) -> R:
        """Decides ``command`` and returns its reply once all it rests on is durable. Raises
        CommandRefused, or NotLeading or Deposed if this process no longer leads."""
        await self.ready()
        reply = self.decide(command)
        await self.group_commit.durable()
        return reply

    def decide(self, command: Command[R]) -> R:
        """The reply, before it may leave: await ``group_commit.durable()`` first. Raises
        CommandRefused, with nothing changed, or NotLeading."""
        if self._spoilt.is_set():
            raise NotLeading("stepping down")
        try:
            reply = command.execute(self.ledger, self.clock.time())
        except CommandRefused:
            raise
        except Exception as error:
            # It has changed what is in memory, and its events will never be in the journal: nothing
            # may be decided on that any more. Whoever leads next reads the journal.
            log.exception("a decision failed halfway command=%s", command.name)
            self._spoil("a decision failed halfway: the ledger is read again")
            raise NotLeading(f"{command.name} failed: stepping down") from error
        self.group_commit.gather()
        return reply

    def check_term(self, seen: int) -> None:
        """Ends this term if a worker has seen a later one: it would follow no directive of this
        leader. The later one has begun elsewhere, or Redis has lost it with the end of the journal.
        Raises NotLeading, or Invalid for a term that no clock has reached: after such a report no
        term would be left for the run."""
        if seen > 1e3 * (self.clock.time() + TERM_AHEAD_S):
            raise Invalid(f"report.seen_term = {seen} is a term of the future: check the clocks")
        if seen > self.term:
            self.election.saw(seen)
            self._spoil(f"a worker has seen term {seen}")
            raise NotLeading(f"a worker has seen term {seen}: stepping down")

    def discard_unneeded(self, refs: Sequence[Ref]) -> None:
        """Deletes those of these payloads that were stored for groups which no step will train."""
        state = self.ledger.state
        self.housekeeping.discard([ref for ref in refs if not may_need(state, ref)])

    async def ready(self) -> None:
        """Returns when this leader may decide. Raises NotLeading after a while of waiting."""
        if self.active:
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.group_commit.flowing()
                while not self.active:
                    if self._ended is not None:
                        raise NotLeading("stepped down")
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise NotLeading(
                self.group_commit.trouble or "the leader's lease has run out"
            ) from None

    @property
    def active(self) -> bool:
        """Appends go through and the lease is ours by our own clock."""
        return (
            self._begun
            and not self._spoilt.is_set()
            and not self.group_commit.trouble
            and self._ended is None
            and self.election.holds_lease
        )

    @property
    def version(self) -> int:
        return int(self.ledger.state.versions.version)

    @property
    def trouble(self) -> str:
        if self.group_commit.trouble:
            return self.group_commit.trouble
        if self.election.holds_lease:
            return ""
        return self._lapse or "waiting for the lease"

    def session_ended(self, session: ServerSession) -> None:
        self.liveness.session_lost(*session.key, self.clock.monotonic())
        fleet = self.ledger.state.fleet
        known = {k: r for k, r in self.last_reports.items() if fleet.current(*k) is not None}
        self.last_reports = {**known, session.key: session.report}

    def describe(self, worker: Worker, status: admin_pb2.WorkerStatus) -> None:
        """Adds what only the leader knows of a living worker: its heartbeat and what it said."""
        key = (worker.worker_id, worker.incarnation)
        found = self.liveness.prognosis(*key, self.clock.monotonic())
        if found is not None:
            status.heartbeat_age_s = found.silent_s
            status.state = "suspect" if found.suspect else status.state
        session = self.sessions.of(*key)
        if session is not None:
            status.activity = session.report.activity
            for name, value in session.report.gauges.items():
                status.gauges[name] = value

    # ---- the term -------------------------------------------------------------------------

    async def run(self) -> None:
        """Leads until deposed (raises Deposed) or cancelled (hands the lease over)."""
        loops = [
            asyncio.create_task(self.group_commit.run(), name="append"),
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
        raise Deposed(self._spoilt_by)

    def _spoil(self, why: str) -> None:
        self._spoilt_by = self._spoilt_by or why
        self._spoilt.set()

    async def _begin(self) -> None:
        before = self.group_commit.at
        self.housekeeping.over = self.ledger.state.ended
        self.decide(self.settings.start_command(self.rows))
        self.decide(cmd.begin_term(self.term, self.context.identity.controller_id))
        self._begun = True
        now = self.clock.monotonic()
        self.liveness.begin(self.ledger, now)
        await self.group_commit.durable()
        at, step = self.group_commit.at.entry, self.ledger.state.versions.step
        event(log, "leading", term=self.term, at=at, step=step)
        self.housekeeping.begin(before)
        await self._tick()

    async def _renew(self) -> None:
        lease_s = self.context.config.controller.leader_lease_s
        lapsed = False
        while True:
            await asyncio.sleep(lease_s / 4)
            try:
                async with asyncio.timeout(lease_s):
                    if self.election.released:
                        return
                    renewed = await self.election.renew(self.term)
                self._lapse = ""
                if not renewed:
                    raise Deposed("the lease is another controller's")
            except (RedisError, OSError, TimeoutError) as error:
                self._lapse = trouble_of(error)
                if not self.election.holds_lease and not lapsed:
                    lapsed = True
                    event(log, "lease lapsed", logging.WARNING, **log_fields(trouble_of(error)))
                    # Workers must not hang on a controller that may already be succeeded.
                    self.sessions.close_all()
                    self.long_polls.wake_all()
                continue
            if lapsed:
                lapsed = False
                event(log, "lease regained", term=self.term)
                # Their silence was ours: everyone gets the full time again.
                self.liveness.begin(self.ledger, self.clock.monotonic())

    async def _tick(self) -> None:
        while True:
            mesh = self.ledger.state.fleet.mesh
            mending = mesh is not None and mesh.broken
            tick_s = self.context.tick_s
            await asyncio.sleep(min(MENDING_TICK_S, tick_s) if mending else tick_s)
            if not self.active:
                continue
            for command in self.liveness.tick(self.ledger, self.clock.monotonic()):
                event(log, "liveness", command=command)
                try:
                    self.decide(command)
                except CommandRefused as refusal:
                    # Overtaken by a request since the evidence was looked at.
                    event(log, "liveness overtaken", why=str(refusal), level=logging.WARNING)

    async def _hand_over(self) -> None:
        """A wanted end: what was decided is made durable, then a standby may take over at once."""
        try:
            async with asyncio.timeout(1.0):
                await self.group_commit.durable()
                await self.housekeeping.hand_over()
                await self.election.release()
        except (RedisError, OSError, TimeoutError) as error:
            event(log, "lease not released", why=type(error).__name__, level=logging.WARNING)
        await self.housekeeping.finish()

    async def _end(self, loops: Sequence[asyncio.Task[Any]]) -> None:
        self._ended = NotLeading("stepped down")
        await cancel_all([*loops, *self.housekeeping.chores])
        self.group_commit.abandon(self._ended)
        self.sessions.close_all()
        self.long_polls.wake_all()
        await self.housekeeping.close()

    # ---- a batch's way --------------------------------------------------------------------

    def _close_batch(self, events: Sequence[Event]) -> Callable[[Entry], None]:
        """The ledger stands exactly at the batch's end: what depends on that is taken now. Returns
        the work for when the batch is durable."""
        directed = any(e.directs for e in events)
        directives = self.sessions.collect() if directed else []
        obsolete = self.ledger.take_garbage()
        snapshot = self.housekeeping.snapshot_due(len(events))
        last = any(isinstance(e, RunFinished | RunFailed) for e in events)

        def durable(entry: Entry) -> None:
            self.long_polls.announce(events)
            for committed in events:
                if isinstance(committed, StepCommitted):
                    self.flow.commit(committed.metrics)
            for session, directive in directives:
                self.sessions.send(session, directive)
            self.housekeeping.record(entry, last=last)
            self.housekeeping.discard(obsolete)
            if snapshot is not None:
                self.housekeeping.begin_save(LedgerSnapshot(entry.at, snapshot, entry.t))

        return durable
