"""Audit of a journal (``paceline ledger verify``): replays it and checks every promise. Writes
nothing.

- Every event is applied to a ledger that checks after each one that no task is lost. At the end
  every invariant is recomputed from the tasks.
- Trained groups are counted a second time from the events alone: no group is in two steps, except
  in steps that a rollback undid.
- Every row of every data-set epoch is accounted for: no row is skipped, and none is finished twice.
  The row of each lease is what the row sampler says.
- Entries are numbered without a gap; terms, versions and mesh epochs only rise.
- If the journal still holds the entries before the snapshot, the snapshot must equal the replayed
  state. Otherwise replay begins at the snapshot, and the counts depend on it.
- The payload of every group that a step may still need must exist.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import redis

from controller.ledger import BrokenInvariant, Ledger
from controller.ledger.enums import Kind
from controller.ledger.events import RowsPassedOver, TasksLeased, from_json
from controller.ledger.state.tasks import ordinal_of
from controller.ledger.views.views import counts, live_payloads
from controller.store.journal import (
    START,
    Entry,
    LedgerSnapshot,
    Position,
    check_format,
    decode_entry,
    order,
)
from controller.store.ledger_follower import coverage_of, totals_of
from controller.store.redis_keys import Keys
from controller.store.stores import urls_of
from paceline.ids import Step, TaskId
from paceline.masking import masked
from paceline.observe.coverage import CoverageReport, Spans, contains, remove
from paceline.observe.projection import Totals
from paceline.observe.vocabulary import EventType
from paceline.payloads.open_store import open_payloads
from paceline.payloads.store import PayloadStore, Ref, Refs
from paceline.redis.client import connect_sync
from paceline.redis.server import NoRedis

READ_COUNT = 256
MAX_PROBLEMS = 50


@dataclass(slots=True)
class Report:
    counts: dict[str, Any] = field(default_factory=dict)
    """dispatched, pending, leased, ready, in_step, trained, dropped (by reason), duplicates, lost,
    steps, events, entries, terms, failovers, mesh_rebuilds, rollbacks."""
    faults: dict[str, Any] = field(default_factory=dict)
    """Causes, hosts and time lost, as in paceline.observe.faults."""
    coverage: CoverageReport = field(default_factory=CoverageReport)
    problems: list[str] = field(default_factory=list)  # One line for each broken promise

    @property
    def ok(self) -> bool:
        return not self.problems

    def problem(self, line: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(line)


def verify(redis_url: str, run_id: str) -> Report:
    """Checks the journal of ``run_id``, up to the entries that exist when the check begins. Raises
    NoRedis if it cannot be read, and ForeignFormat if another release wrote it."""
    client = connect_sync(redis_url, timeout_s=30.0)
    try:
        with client:
            return _verify(client, Keys(run_id), redis_url)
    except (redis.RedisError, OSError) as error:
        raise NoRedis(f"the journal at {masked(redis_url)} cannot be read: {error}") from error


def _verify(client: Any, keys: Keys, redis_url: str) -> Report:
    report = Report()
    head = client.hgetall(keys.head)
    if not head:
        report.problem(f"there is no journal of run {keys.run_id!r}")
        return report
    check_format(head.get(b"format"))
    end = head[b"position"].decode()
    stored = client.get(keys.snapshot)
    snapshot = json.loads(stored) if stored else None
    if snapshot is not None:
        check_format(snapshot.get("format"))
    first = next(iter(_entries(client, keys, START, count=1)), None)
    replay = _Replay(report)
    if first is None or first.at.number != 1:
        if snapshot is None:
            report.problem("the journal was trimmed and there is no snapshot")
            return report
        replay.begin_at(snapshot)
    for entry in _entries(client, keys, replay.after):
        if order(end) < order(entry.at.entry):
            break
        replay.take(entry)
        if snapshot is not None and entry.at.entry == snapshot["at"][0]:
            replay.compare(snapshot)
        if replay.broken:
            break
    replay.finish(client, keys, redis_url)
    return report


class _Replay:
    """One pass over the journal."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.ledger = Ledger(checked=True)
        self.after = START
        self.broken = False
        self._number = 0
        self._term = 0
        self._version = 0
        self._epoch = 0
        self._events = 0
        self._open: tuple[Step, tuple[TaskId, ...]] = (Step(0), ())
        self._trained: dict[Step, tuple[TaskId, ...]] = {}
        """Groups of each committed step that no rollback undid, by step, from the events."""
        self.totals = Totals()
        self._covered: Spans = []
        """Groups that were trained under a checkpoint before the replay began."""

    def begin_at(self, snapshot: Mapping[str, Any]) -> None:
        at, saved = Position(*snapshot["at"]), snapshot["state"]
        self.ledger = Ledger.from_snapshot(saved, checked=True)
        self.totals = totals_of(LedgerSnapshot(at, saved, 0.0, snapshot.get("observed")))
        self.after, self._number = at.entry, at.number
        state = self.ledger.state
        self._term = state.term
        self._version = state.versions.version
        self._epoch = state.fleet.mesh_epoch
        self._trained = dict(state.steps.history)
        self._covered = list(self.totals.coverage.trained)
        for task_ids in self._trained.values():
            for task_id in task_ids:
                remove(self._covered, ordinal_of(task_id))
        if state.steps.open is not None:
            self._open = (state.steps.open.step, state.steps.open.groups)

    def take(self, entry: Entry) -> None:
        if entry.at.number != self._number + 1:
            self.report.problem(f"entry {entry.at.number} follows entry {self._number}")
        self._number = entry.at.number
        if entry.term < self._term:
            self.report.problem(
                f"entry {entry.at.number} is of term {entry.term}, a deposed leader's"
            )
        self._term = max(self._term, entry.term)
        for raw in entry.events:
            self._events += 1
            self._count(raw)
            try:
                event = from_json(raw)
                if isinstance(event, RowsPassedOver):
                    self._check_passed(event)
                self.ledger.apply(event)
                self.totals.take(entry.t, raw)
                if isinstance(event, TasksLeased):
                    self._check_rows(event)
            except (BrokenInvariant, AssertionError, KeyError, ValueError) as error:
                self.report.problem(f"entry {entry.at.number}, {raw['type']}: {error}")
                self.broken = True
                return
        self.ledger.take_garbage()

    def _check_rows(self, event: TasksLeased) -> None:
        data_order = self.ledger.state.run.order
        for lease in event.leases:
            if lease.kind is not Kind.TRAIN:
                continue
            ordinal = ordinal_of(lease.task_id)
            expected = data_order.place(ordinal)
            if (lease.dataset_pass, lease.index) != expected:
                self.report.problem(
                    f"{lease.task_id} was leased with row {lease.index} of epoch "
                    f"{lease.dataset_pass}, which is row {expected[1]} of epoch {expected[0]}"
                )

    def _check_passed(self, event: RowsPassedOver) -> None:
        """Check that the curriculum leaves out these rows, by what was measured before."""
        state = self.ledger.state
        run, order = state.run, state.run.order
        for ordinal in event.ordinals:
            row = order.place(ordinal)[1]
            if not run.curriculum_min or not state.tasks.curriculum.leaves_out(
                row, ordinal, run.seed, run.curriculum_min
            ):
                self.report.problem(
                    f"row {row}, the turn of t{ordinal}, was passed over without a reason"
                )

    def _count(self, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == EventType.STEP_OPENED:
            self._open = (event["step"], tuple(event["groups"]))
        elif kind == EventType.STEP_COMMITTED:
            step, groups = self._open
            if step != event["step"]:
                self.report.problem(f"step {event['step']} committed, {step} was open")
            self._rise("version", event["version"], self._version)
            self._version = event["version"]
            self._trained[step] = groups
        elif kind == EventType.ROLLED_BACK:
            self._rise("version", event["version"], self._version)
            self._version = event["version"]
            self._trained = {s: g for s, g in self._trained.items() if s <= event["step"]}
        elif kind == EventType.MESH_FORMED:
            self._rise("mesh epoch", event["epoch"], self._epoch)
            self._epoch = event["epoch"]

    def _rise(self, what: str, value: int, before: int) -> None:
        if value <= before:
            self.report.problem(f"{what} {value} follows {before}")

    def compare(self, snapshot: Mapping[str, Any]) -> None:
        # Decoded first: a field that is new since the snapshot was saved has its default.
        saved = Ledger.from_snapshot(snapshot["state"]).fingerprint()
        if saved != self.ledger.fingerprint():
            self.report.problem("the snapshot differs from the state that its journal leads to")

    def finish(self, client: Any, keys: Keys, redis_url: str) -> None:
        state = self.ledger.state
        for line in self.ledger.check():
            self.report.problem(line)
        trained = [ordinal_of(t) for groups in self._trained.values() for t in groups]
        duplicates = len(trained) - len(set(trained))
        duplicates += sum(contains(self._covered, ordinal) for ordinal in trained)
        if duplicates:
            self.report.problem(f"{duplicates} groups were trained twice")
        view = counts(state)
        kept = view.pending + view.leased + view.ready + view.in_step + view.trained
        lost = view.dispatched - kept - sum(view.dropped.values())
        if lost:
            self.report.problem(f"{lost} tasks are nowhere")
        if not self.broken:
            self._check_payloads(client, keys, redis_url)
            self.report.coverage = coverage_of(self.totals, state)
            for line in self.report.coverage.problems():
                self.report.problem(line)
        self.report.counts = {
            **asdict(view),
            "duplicates": duplicates,
            "lost": lost,
            "steps": state.versions.step,
            "events": self._events,
            "entries": self._number,
            "terms": state.terms,
            "failovers": state.failovers,
            "mesh_rebuilds": state.fleet.mesh_rebuilds,
            "rollbacks": state.versions.rollbacks,
        }
        self.report.faults = self.totals.faults.report().to_json()

    def _check_payloads(self, client: Any, keys: Keys, redis_url: str) -> None:
        refs = sorted(live_payloads(self.ledger.state))
        urls = urls_of(client.get(keys.payloads_at))
        store = open_payloads(urls, keys.run_id, redis_url)
        missing = _missing(store, refs)
        # In a running run, a newer checkpoint may have made payloads unnecessary.
        if missing and client.hget(keys.head, "n") == str(self._number).encode():
            shown = ", ".join(f"{task_id} attempt {attempt}" for task_id, attempt in missing[:5])
            self.report.problem(f"{len(missing)} payloads are missing: {shown}")


def _missing(store: PayloadStore, refs: Sequence[Ref]) -> Refs:
    """Payloads of ``refs`` that are not stored. Blocks; callable where an event loop runs."""

    async def ask() -> Refs:
        try:
            return await store.missing(refs)
        finally:
            await store.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(ask())).result()


def _entries(client: Any, keys: Keys, after: str, count: int = READ_COUNT) -> Iterator[Entry]:
    while rows := client.xrange(keys.journal, min=f"({after}", count=count):
        for position, fields in rows:
            yield decode_entry(position, fields)
        after = rows[-1][0].decode()
