"""Projection of a run: what its journal says to people, folded once.

    journal entry ──► take ──┐
    events.jsonl  ──► read ──┴─► events, metrics, evals, ... ──► REST, CLI, console, summary, export
                                 totals (coverage, faults, dropped groups)

The leader hands over each entry once it is durable, a standby each entry that it follows, an audit
each entry that it replays. ``read`` takes the run's file instead: the same code, with the same
result for all that is listed for people. Events that happen many times a step are in no file, so
coverage and dropped groups need the journal; a cache of ``totals`` lies beside the ledger's
snapshot and bounds its replay.

A record is an event as it is journalled, with ``severity`` and ``text`` if it is listed. A line is
the record of a listed event with ``position``, ``n`` (its number within the entry) and ``t``, as in
events.jsonl.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from paceline.masking import Redactor
from paceline.observe.checkpoints import Checkpoints
from paceline.observe.coverage import Coverage
from paceline.observe.curves import RATE_STEPS, MetricStore
from paceline.observe.event_history import (
    ENDS,
    EventHistory,
    Key,
    ListedEvent,
    Status,
    is_listed,
    position_key,
    text_of,
)
from paceline.observe.faults import Faults
from paceline.observe.groups import DroppedGroups
from paceline.observe.held_out import HeldOut
from paceline.observe.run_files import DamagedFile, finite, metrics_row, read_lines
from paceline.observe.swim_lanes import SwimLanes
from paceline.observe.vocabulary import EventType, Severity

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_EVALS = 20_000
_STATUS: Mapping[str, Status] = {
    **ENDS,
    EventType.RUN_SUSPENDED: "interrupted",
    EventType.RUN_CONTINUED: "",
    EventType.RUN_EXTENDED: "",
}
_HEAD = frozenset({"position", "n", "t", "type", "after", "counts", "severity", "text"})
MOST_WAITING = 512
PATIENCE_S = 0.3
"""Longest wait for a glance at a long run whose file is still read; then the last one counts."""


@dataclass(slots=True)
class Totals:
    """Counts over the whole run. A snapshot of the ledger is saved with its encoding."""

    coverage: Coverage = field(default_factory=Coverage)
    faults: Faults = field(default_factory=Faults)
    dropped: DroppedGroups = field(default_factory=DroppedGroups)

    def take(self, t: float, record: Mapping[str, Any]) -> None:
        """Takes the next event of the journal, journalled at ``t`` (Unix seconds)."""
        kind = record["type"]
        self.coverage.take(kind, record)
        self.faults.take(kind, record)
        self.dropped.take(t, kind, record)


class Projection:
    """``clean`` is applied to the words of events before they are kept. Not thread-safe."""

    def __init__(self, clean: Callable[[Any], Any] = lambda value: value) -> None:
        self.history = EventHistory()
        self.checkpoints = Checkpoints()
        self.metrics = MetricStore()  # Metrics of the committed steps on the surviving line
        self.evals: list[dict[str, Any]] = []
        """step, version, t, eval_reward_mean, eval_count and eval_SET/METRIC of each evaluation, by
        step."""
        self.held_out = HeldOut()
        self.totals = Totals()
        self.lanes = SwimLanes()  # Of the journal alone
        self.step = 0  # Committed steps on the surviving line
        self.position = ""  # Journal position of the newest listed event
        self.resumed: list[float] = []
        """When a leader began without a failover: at the start of the run, and each time a run that
        had been stopped was resumed. Unix seconds, ascending."""
        self.status: Status = ""  # Empty while the run goes on, or if it was killed
        self.reason = ""  # Reason for which the run has ended, or was stopped for now
        self.took_s: float | None = None
        """Time of all sessions, without the pauses between them; None without any event."""
        self._clean = clean
        self._newest_t = 0.0
        self._last: Key = ((), -1)
        self._counted: tuple[int, ...] = ()  # Journal position of the newest entry in ``totals``

    @classmethod
    def read(cls, run_dir: Path, clean: Callable[[Any], Any] = lambda value: value) -> "Projection":
        """The run in ``run_dir``, by its file. Raises DamagedFile."""
        projection = cls(clean)
        path = run_dir / "events.jsonl"
        for number, line in enumerate(read_lines(path)):
            line = {"type": "", "position": "", "n": number, "t": 0.0, **line}
            try:
                projection.add_line(line)
                projection.totals.faults.take(line["type"], line)
            except (KeyError, TypeError, ValueError) as error:
                event = f"{line['type']} {line['position']}/{line['n']}"
                raise DamagedFile(
                    f"{path}: the event {event} is damaged ({error!r}): remove its line to continue"
                ) from error
        return projection

    def read_history(self, run_dir: Path) -> bool:
        """Takes the lines of a run that goes on, up to the first damaged one; False without any.
        Its totals come from the ledger's snapshot."""
        with suppress(KeyError, TypeError, ValueError, OSError):
            for line in read_lines(run_dir / "events.jsonl"):
                if "position" in line:
                    self.add_line(line)
        return bool(self.position)

    def restore(self, totals: Totals, position: str) -> None:
        """Goes on from ``totals``, as of the entry at ``position``."""
        self.totals, self._counted = totals, position_key(position)

    def take(self, position: str, t: float, records: Iterable[Mapping[str, Any]]) -> None:
        """Takes a journal entry, appended at ``t`` (Unix seconds); a repeat changes nothing."""
        key = position_key(position)
        fresh, self._counted = key > self._counted, max(key, self._counted)
        for n, record in enumerate(records):
            if fresh:
                self.totals.take(t, record)
                self._draw(t, record)
            if is_listed(record):
                self.add_line({"position": position, "n": n, "t": round(t, 3), **finite(record)})

    def _draw(self, t: float, record: Mapping[str, Any]) -> None:
        try:
            self.lanes.timeline.take(t, record)
        except Exception:  # a picture costs no total of the ledger
            log.exception("the timeline begins anew")
            self.lanes = SwimLanes()

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Takes a line of events.jsonl. One that is known already changes nothing."""
        key = (position_key(str(line["position"])), int(line["n"]))
        if key <= self._last:
            return
        self._last, self.position = key, str(line["position"])
        event = self._listed(line)
        self._follow(event, line)
        self.history.keep(event)
        self.checkpoints.take(event.type, line)
        self.held_out.take(event.type, line)
        if line.get("type") == EventType.ROLLED_BACK:
            self.metrics.cut(int(line["step"]))
        elif (row := metrics_row(line)) is not None:
            row = {"t": line["t"], **row}
            if row["kind"] == "step":
                self.metrics.append(row)
            else:
                del row["kind"]
                self.evals = [e for e in self.evals if e["step"] != row["step"]] + [row]
                self.evals.sort(key=lambda e: int(e["step"]))
                del self.evals[:-MOST_EVALS]

    def _listed(self, line: Mapping[str, Any]) -> ListedEvent:
        kind = str(line.get("type", ""))
        fields = {k: v for k, v in line.items() if k not in _HEAD}
        if kind == EventType.STEP_COMMITTED:
            # metrics.jsonl has the rest.
            reward = (line.get("metrics") or {}).get("reward_mean")
            fields = {"step": line["step"], "reward_mean": reward}
        elif kind == EventType.RUN_STARTED:
            fields = {}
        return ListedEvent(
            id=f"{self.position}/{int(line['n'])}",
            t=float(line["t"]),
            type=kind,
            step=int(line["step"]) if kind == EventType.STEP_COMMITTED else self.step,
            severity=Severity(line.get("severity") or Severity.INFO),
            text=self._clean(text_of(line)),
            fields=self._clean(fields),
        )

    def _follow(self, event: ListedEvent, line: Mapping[str, Any]) -> None:
        begins = event.type == EventType.TERM_BEGUN and not line.get("failover")
        if begins:
            self.resumed.append(event.t)
        if self.took_s is None:
            self.took_s = 0.0
        elif not begins:
            self.took_s += max(0.0, event.t - self._newest_t)
        self._newest_t = event.t
        if (status := _STATUS.get(event.type)) is not None:
            self.status = status
            self.reason = str(line.get("reason") or "") if status else ""
        if event.type in (EventType.STEP_COMMITTED, EventType.ROLLED_BACK):
            self.step = int(line["step"])

    def newest_steps(self, count: int) -> Sequence[Mapping[str, Any]]:
        """Rows of the newest committed steps, oldest first."""
        return self.metrics.rows(-1, count)


@dataclass(frozen=True, slots=True)
class Glance:
    """Extract of the projection that the status of the run shows."""

    steps: Sequence[Mapping[str, Any]] = ()  # Rows of the newest committed steps, oldest first
    faults: str = ""  # In a sentence; empty: there were none
    reward_trouble: str = ""


class Projector:
    """The projection in a thread of its own, so that an event loop does not wait for it. Nothing is
    folded before somebody asks, or before ``MOST_WAITING`` entries wait: a thread that is woken for
    every entry would compete with the event loop for the interpreter. ``inline``: without a thread,
    for virtual time."""

    def __init__(self, run_dir: Path, *, inline: bool = False) -> None:
        self._run_dir = run_dir
        self._clean = Redactor(run_dir).value
        self._projection = Projection(self._clean)
        self._waiting: list[tuple[str, float, Sequence[Mapping[str, Any]]]] = []
        self._asked: dict[int, list[tuple[str, float, Sequence[Mapping[str, Any]]]]] = {}
        """Entries of questions that wait for the thread, by their lists' ids."""
        self._beginnings: deque[tuple[Callable[[], Totals] | None, str]] = deque(maxlen=1)
        self._taking = threading.Lock()  # Entries reach the projection in their order
        self._pool = None if inline else ThreadPoolExecutor(1, thread_name_prefix="projection")
        self._glancing: asyncio.Task[Glance] | None = None
        self.glance = Glance()  # As of the last ``look``

    # ---- feeding --------------------------------------------------------------------------

    def begin(self, totals: Callable[[], Totals] | None, position: str) -> bool:
        """Begins anew: from the run's file, and from the totals as of ``position``, which are read
        in the thread. Returns whether there is no such file, as on another machine than the
        leader's. A controller that loses Redis again and again does so faster than a starved
        thread reads: what waited for it is dropped, and only the newest beginning is read."""
        with self._taking:
            for entries in [self._waiting, *list(self._asked.values())]:
                entries.clear()
            self._beginnings.append((totals, position))
            self._submit(self._load)
        return not (self._run_dir / "events.jsonl").is_file()

    def _load(self) -> None:
        if not self._beginnings:
            return  # a later one was read in the place of an earlier one
        totals, position = self._beginnings.pop()
        self._projection = Projection(self._clean)
        self._projection.read_history(self._run_dir)
        if totals is not None:
            self._projection.restore(totals(), position)

    def post(self, position: str, t: float, records: Sequence[Mapping[str, Any]]) -> None:
        """Takes a durable entry; returns at once."""
        with self._taking:
            self._waiting.append((position, t, records))
        if len(self._waiting) >= MOST_WAITING:
            self.begin_ask(lambda projection: None)

    # ---- answering ------------------------------------------------------------------------

    def begin_ask(self, question: Callable[[Projection], T]) -> Future[T]:
        """The answer to come, with all that was posted so far and nothing that is posted later. Any
        thread may ask."""
        with self._taking:
            entries, self._waiting = self._waiting, []
            self._asked[id(entries)] = entries

            def answer() -> T:
                try:
                    for position, t, records in entries:
                        self._projection.take(position, t, records)
                finally:
                    del self._asked[id(entries)]
                return question(self._projection)

            return self._submit(answer)

    async def ask(self, question: Callable[[Projection], T]) -> T:
        return await answer_of(self.begin_ask(question))

    async def look(self) -> Glance:
        """A fresh glance, or the last one if that takes long."""
        if self._glancing is None or self._glancing.done():
            self._glancing = asyncio.create_task(self.ask(_glance_at))
        asked = self._glancing
        await asyncio.wait({asked}, timeout=PATIENCE_S)
        if asked.done() and not asked.cancelled() and asked.exception() is None:
            self.glance = asked.result()
        return self.glance

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        if self._pool is not None:
            return self._pool.submit(work)
        done: Future[T] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done


def _glance_at(run: Projection) -> Glance:
    faults = run.totals.faults.sentence
    return Glance(run.newest_steps(RATE_STEPS), faults, run.held_out.trouble)


async def answer_of(asked: Future[T]) -> T:
    return asked.result() if asked.done() else await asyncio.wrap_future(asked)
