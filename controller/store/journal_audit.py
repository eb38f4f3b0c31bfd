"""Audit of a journal (``paceline ledger verify``): replays it and checks every promise. Writes
nothing.

- Every event is applied to a ledger that checks after each one that no task is lost. At the end
  every invariant is recomputed from the tasks.
- Every row of every data-set epoch is accounted for, counted a second time from the events alone:
  no row is skipped, and none is trained twice, except in steps that a rollback undid.
- Entries are numbered without a gap, and their terms only rise.
- If the journal still holds the entries before the snapshot, the snapshot must equal the replayed
  state. Otherwise replay begins at the snapshot, and the counts depend on it.
- The payload of every group that a step may still need must exist.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from redis.exceptions import RedisError

from controller.ledger import BrokenInvariant, Ledger
from controller.ledger.events import from_json
from controller.ledger.views import counts, live_payloads
from controller.store.journal import START, Entry, Journal, LedgerSnapshot, Position
from controller.store.ledger_follower import coverage_of, totals_of
from controller.store.redis_keys import Keys
from controller.store.stores import RunRegistry
from paceline.masking import masked
from paceline.observe.coverage import CoverageReport
from paceline.observe.projection import Totals
from paceline.payloads.open_store import open_payloads
from paceline.redis.client import connect
from paceline.redis.server import NoRedis

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
    """Checks the journal of ``run_id``, up to the entries that exist when the check begins. Blocks;
    callable where an event loop runs. Raises NoRedis if it cannot be read, and ForeignFormat if
    another release wrote it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, _verify(redis_url, Keys(run_id))).result()


async def _verify(redis_url: str, keys: Keys) -> Report:
    try:
        async with connect(redis_url, timeout_s=30.0) as client:
            replay = _Replay(Journal(client, keys))
            await replay.run()
            if not replay.report.problems:
                urls = await RunRegistry(client, keys).payload_urls()
                await replay.check_payloads(urls, redis_url, keys.run_id)
            return replay.report
    except (RedisError, OSError) as error:
        raise NoRedis(f"the journal at {masked(redis_url)} cannot be read: {error}") from error


class _Replay:
    """One pass over the journal."""

    def __init__(self, journal: Journal) -> None:
        self.report = Report()
        self._journal = journal
        self._ledger = Ledger(checked=True)
        self._at = Position()
        self._term = 0
        self._events = 0
        self._totals = Totals()

    async def run(self) -> None:
        head = await self._journal.head()
        snapshot = await self._journal.load_snapshot()
        first = await self._journal.scan(START, count=1)
        if not head.number:
            self.report.problem("there is no journal of this run")
            return
        if not first or first[0].at.number != 1:
            if snapshot is None:
                self.report.problem("the journal was trimmed and there is no snapshot")
                return
            self._begin_at(snapshot)
        try:
            while entries := await self._journal.scan(self._at.entry, until=head.entry):
                for entry in entries:
                    self._take(entry)
                    # Decoded first: a field that is new since it was saved has its default.
                    if snapshot is not None and entry.at == snapshot.at:
                        saved = Ledger.from_snapshot(dict(snapshot.state)).fingerprint()
                        if saved != self._ledger.fingerprint():
                            self.report.problem("the snapshot differs from what it is replayed to")
        except (BrokenInvariant, AssertionError, KeyError, ValueError) as error:
            self.report.problem(f"entry {self._at.number}: {error}")
        self._finish()

    def _begin_at(self, snapshot: LedgerSnapshot) -> None:
        self._at, state = snapshot.at, dict(snapshot.state)
        self._totals = totals_of(snapshot)
        self._ledger = Ledger.from_snapshot(state, checked=True)
        self._term = self._ledger.state.term

    def _take(self, entry: Entry) -> None:
        if entry.at.number != self._at.number + 1:
            self.report.problem(f"entry {entry.at.number} follows entry {self._at.number}")
        if entry.term < self._term:
            self.report.problem(f"entry {entry.at.number} is of term {entry.term}, a deposed one")
        self._at, self._term = entry.at, max(self._term, entry.term)
        for raw in entry.events:
            self._events += 1
            self._ledger.apply(from_json(raw))
            self._totals.take(entry.t, raw)
        self._ledger.take_garbage()

    def _finish(self) -> None:
        state = self._ledger.state
        view = counts(state)
        kept = view.pending + view.leased + view.ready + view.in_step + view.trained
        lost = view.dispatched - kept - sum(view.dropped.values())
        for line in self._ledger.check():
            self.report.problem(line)
        if not self.report.problems:  # a ledger that broke halfway accounts for nothing
            self.report.coverage = coverage_of(self._totals, state)
            for line in self.report.coverage.problems():
                self.report.problem(line)
        if lost:
            self.report.problem(f"{lost} tasks are nowhere")
        self.report.counts = {
            **asdict(view),
            "duplicates": self.report.coverage.twice,
            "lost": lost,
            "steps": state.versions.step,
            "events": self._events,
            "entries": self._at.number,
            "terms": state.terms,
            "failovers": state.failovers,
            "mesh_rebuilds": state.fleet.mesh_rebuilds,
            "rollbacks": state.versions.rollbacks,
        }
        self.report.faults = self._totals.faults.report()

    async def check_payloads(self, urls: list[str], redis_url: str, run_id: str) -> None:
        store = open_payloads(urls, run_id, redis_url)
        try:
            missing = await store.missing(sorted(live_payloads(self._ledger.state)))
        finally:
            await store.close()
        # In a running run, a newer checkpoint may have made payloads unnecessary.
        if missing and await self._journal.head() == self._at:
            shown = ", ".join(f"{task_id} attempt {attempt}" for task_id, attempt in missing[:5])
            self.report.problem(f"{len(missing)} payloads are missing: {shown}")
