"""Background tasks of the leader: run files, metric sinks, snapshots, and deletion of old payloads.

None of it may hold up a request, and none of it is needed for the next: if Redis is away it is left
to the next time, or to the next leader."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from controller.context import ControllerContext
from controller.export.exporters import FINISH_S
from controller.ledger import Ledger
from controller.ledger.codec import encode
from controller.ledger.enums import Phase
from controller.ledger.events import StepCommitted, TaskDropped
from controller.ledger.views import live_payloads, may_need
from controller.runtime import NotLeading
from controller.store.group_commit import GroupCommit
from controller.store.journal import START, Deposed, Entry, LedgerSnapshot, Position, RedisFull
from paceline.observe.projection import answer_of
from paceline.payloads.store import Ref, partial_ref
from paceline.process.structured_log import event

log = logging.getLogger(__name__)

SYNC_S = 2.5
"""Redis syncs its append-only file each second and may lag by another one (appendfsync everysec):
after this time a power cut does not lose an entry."""
GATE_S = 1.0  # Between two questions whether a replica of Redis has an entry
SWEEP_S = 600.0
"""Between two sweeps of payloads that nobody refers to: their workers died before submitting."""
HAND_OVER_S = 0.3
"""How long a leader that leaves waits for a sink in the middle of a write before it lets go."""


ARCHIVE_S = 30.0  # How long the last payloads of a run are kept for the archive to read them
END_ALERT_S = 12.0
"""How long the process waits at the end of a run for its last alert: a receiver that takes longer
than the time limit of one try may miss it."""


class Housekeeping:
    def __init__(
        self,
        context: ControllerContext,
        term: int,
        ledger: Ledger,
        group_commit: GroupCommit,
        snapshot_at: str,
    ) -> None:
        """``snapshot_at``: position of the newest snapshot there is."""
        self.files, self.exporters = context.open_exports()
        self.over = False  # The end of the run is durable
        self.chores: dict[asyncio.Task[None], None] = {}
        self._context = context
        self._term = term
        self._ledger = ledger
        self._group_commit = group_commit
        self._snapshot_at = snapshot_at
        self._events_since_snapshot = 0
        self._held_lines: list[Entry] | None = []
        """Entries to be written once the lines before them are; None: those are."""
        self._obsolete: list[Ref] = []
        """Payloads that the newest durable entry makes needless, until they are deleted."""
        self._synced_t = 0.0
        """Monotonic time at which Redis has synced the entry that makes them needless."""
        self._deleting = False
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def begin(self, before: Position) -> None:
        """The term is in the journal, behind ``before``."""
        self.files.start()
        self.exporters.start(self._ledger.state.started_t, self._progress)
        if (archive := self.exporters.archive) is not None:
            state, now = self._ledger.state, self._context.clock.time()
            self.chore(archive.run(self._term, state, now))
        self.chore(self._write_missing_lines(before))
        self.chore(self._sweep())

    def _progress(self) -> int | None:
        state = self._ledger.state
        return state.versions.step if state.phase is Phase.OPEN and not state.paused else None

    def chore(self, coro: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coro)
        self.chores[task] = None
        task.add_done_callback(self._chore_done)

    def _chore_done(self, task: asyncio.Task[None]) -> None:
        del self.chores[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            what = getattr(task.get_coro(), "__qualname__", "")
            log.error("a chore failed what=%s", what, exc_info=error)

    # ---- run files and sinks ------------------------------------------------------------------

    def record(self, entry: Entry, *, last: bool) -> None:
        """Writes what has become durable; ``last``: the run has ended with it."""
        if self._held_lines is None:
            self._write(entry)
        else:
            self._held_lines.append(entry)
        if (archive := self.exporters.archive) is not None:
            for done, data in zip(entry.decoded, entry.events, strict=True):
                if isinstance(done, StepCommitted):
                    archive.keep(self._ledger.state, done.step, entry.t)
                elif isinstance(done, TaskDropped):
                    archive.drop(self._ledger.state, data, entry.t)
        if last:
            self.over = True
            self.chore(self._finish_outflow())

    def _write(self, entry: Entry) -> None:
        told = entry.at.entry, entry.t, entry.records
        self.files.record(*told)
        self.exporters.record(*told)

    async def _write_missing_lines(self, end: Position) -> None:
        """First what earlier leaders journalled and did not write, then what waited meanwhile."""
        position = await self.files.opened() or START
        try:
            while entries := await self._context.stores.journal.scan(position, until=end.entry):
                for entry in entries:
                    self._write(entry)
                position = entries[-1].at.entry
        except (RedisError, OSError) as error:
            event(log, "run files have a gap", why=str(error), level=logging.WARNING)
        held, self._held_lines = self._held_lines or [], None
        for held_entry in held:
            self._write(held_entry)
        if self.over:
            await self._finish_outflow()

    async def _finish_outflow(self) -> None:
        """The run is over: sinks are closed as soon as they have its last lines."""
        if self._held_lines is None:
            if self.exporters.archive is not None:
                await self.exporters.archive.write()
            await self.files.written()
            self.exporters.begin_close(self._outcome)

    @property
    def _outcome(self) -> str | None:
        """finished or failed; None: the run goes on."""
        state = self._ledger.state
        return str(state.phase) if state.ended else None

    async def hand_over(self) -> None:
        """The next leader goes on after the last line, so there must be one before it can begin."""
        await asyncio.to_thread(self.files.close)
        self.exporters.begin_close(self._outcome)
        if self.exporters.archive is not None:
            # The next leader archives what is not written by then.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.exporters.archive.write(), HAND_OVER_S)
        await asyncio.to_thread(self.exporters.join, HAND_OVER_S)

    async def finish(self) -> None:
        """Gives the sinks of a run that has ended their time, and deletes its last payloads."""
        if self._outcome is not None:
            if self.exporters.archive is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.exporters.archive.write(over=True), ARCHIVE_S)
            sinks = asyncio.to_thread(self.exporters.join, FINISH_S)
            await asyncio.gather(self._delete_last(), sinks)
            if self.exporters.alerts is not None:
                # The end of the run is the alert that matters most.
                await asyncio.to_thread(self.exporters.alerts.join, END_ALERT_S)

    async def close(self) -> None:
        self.exporters.begin_close(None)
        await asyncio.to_thread(self.files.close)

    # ---- snapshots ----------------------------------------------------------------------------

    def snapshot_due(self, events: int) -> dict[str, Any] | None:
        """The ledger as it stands, where enough events have come since the last time."""
        self._events_since_snapshot += events
        moment = self._ledger.state.tasks.moment
        writing = moment is not None and not moment.over
        if writing or self._events_since_snapshot < self._context.config.controller.snapshot_every:
            return None
        self._events_since_snapshot = 0
        return self._ledger.begin_snapshot()

    def begin_save(self, snapshot: LedgerSnapshot) -> None:
        """Saves what ``snapshot_due`` returned, with the totals of that entry."""
        observed = self._context.projector.begin_ask(lambda projection: encode(projection.totals))
        self.chore(self._save(snapshot, observed))

    async def _save(self, snapshot: LedgerSnapshot, observed: Future[dict[str, Any]]) -> None:
        try:
            totals = await answer_of(observed)
            snapshot = replace(snapshot, observed=totals)
            await self._context.stores.journal.save_snapshot(
                snapshot, term=self._term, trim_before=self._snapshot_at
            )
        except (RedisError, RedisFull, OSError, Deposed) as error:
            # Only replay gets longer; the next one is due in as many events.
            event(log, "snapshot not saved", why=str(error), level=logging.WARNING)
            return
        finally:
            snapshot.state["tasks"]["records"].close()
        self._snapshot_at = snapshot.at.entry
        event(log, "snapshot", at=snapshot.at.entry, entries=snapshot.at.number)

    # ---- payloads -----------------------------------------------------------------------------

    def discard(self, refs: Sequence[Ref]) -> None:
        """Deletes payloads that a durable entry makes needless, once that entry is safe: if it were
        lost, the run would go back to a checkpoint that needs them."""
        self._obsolete.extend(refs)
        if refs:
            self._synced_t = self._context.clock.monotonic() + SYNC_S
        if self._obsolete and not self._deleting:
            self._deleting = True
            self.chore(self._delete_obsolete())

    async def _delete_obsolete(self) -> None:
        try:
            while self._obsolete:
                # They stay in the list meanwhile: if the process ends before they are safe,
                # ``finish`` has its turn with them.
                refs = list(self._obsolete)
                await self._until_safe()
                await self._delete(refs)
                del self._obsolete[: len(refs)]
        finally:
            self._deleting = False

    async def _delete_last(self) -> None:
        """Deletes what is left if its record is safe. If not, the files stay for the next leader's
        sweep: a power cut may take back the record, and never the removal of a file."""
        if refs := list(self._obsolete):
            await self.sleep(max(0.0, self._synced_t - self._context.clock.monotonic()))
            # Its lease is released; the record counts if nobody has led since.
            newest = self._context.stores.election.is_newest
            if await self._is_safe(self._group_commit.at.number, newest):
                await self._delete(refs)

    async def _until_safe(self) -> None:
        """Returns once no failover of Redis and no power cut would lose the newest entry."""
        number, renew = self._group_commit.at.number, self._context.stores.election.renew
        await self.sleep(SYNC_S)
        waited = False
        while not await self._is_safe(number, renew):
            if not waited:
                why = "no replica of Redis has the record of their checkpoint"
                event(log, "payloads are kept", why=why, level=logging.WARNING)
            waited = True
            await self.sleep(GATE_S)

    async def _is_safe(self, number: int, ours: Callable[[int], Awaitable[bool]]) -> bool:
        """True if the journal, still ``ours`` by the term, and a replica hold entry ``number``."""
        try:
            if not await self._context.survives_failover():
                return False
            # A failover may have lost the entry already: then this leader is about to find out.
            head = await self._context.stores.journal.head()
            return head.number >= number and await ours(self._term)
        except (RedisError, OSError, Deposed):
            return False

    async def _delete(self, refs: Sequence[Ref]) -> None:
        if self.exporters.archive is not None:
            await self.exporters.archive.write()
        # After a lost tail of the journal a task may have an attempt of the same number again.
        needless = [ref for ref in refs if not may_need(self._ledger.state, ref)]
        try:
            await self._context.stores.payloads.delete(needless)
        except (RedisError, OSError) as error:
            # The next leader sweeps what is left.
            event(log, "payloads not deleted", why=str(error), level=logging.WARNING)

    async def _sweep(self) -> None:
        while True:
            await self._until_safe()
            await self.sweep_orphans()
            await self.sleep(SWEEP_S)

    async def sweep_orphans(self) -> None:
        """Payloads that no accepted group needs: left by a leader that died before deleting them,
        or by a worker that died before it submitted the metadata."""
        try:
            found = await self._context.stores.payloads.list()
        except (RedisError, OSError):
            return
        # Looked up now and not before the listing: what came in meanwhile is known by now.
        needed = live_payloads(self._ledger.state)
        # A group under way may have been stored by the leader before, and be handed in again any
        # time.
        tasks = self._ledger.state.tasks.records.values()
        expected = {task.ref for task in tasks if task.leased}
        expected.update(partial_ref(task.task_id) for task in tasks if task.group is None)
        spare = [ref for ref in found if ref not in needed and ref not in expected]
        if not spare:
            return
        try:
            # What the ledger says must be durable, and no successor may have accepted groups since
            # the listing: a leader that was stopped in between would delete what they need.
            await self._group_commit.durable()
            if not await self._context.stores.election.renew(self._term):
                return
        except (RedisError, OSError, NotLeading, Deposed):
            return
        # What a checkpoint covers since a moment ago is no orphan: its record may still be lost.
        covered = set(self._obsolete)
        orphans = [ref for ref in spare if ref not in covered]
        if not orphans:
            return
        await self._delete(orphans)
        event(log, "orphaned payloads deleted", count=len(orphans))
