"""What the run files say, kept in memory and read on as they grow: never a whole file a request.

Everything here lives in one thread of its own, so that the event loop, which serves the fleet, does
not wait for it. Where there are no run files (a standby on another machine) the journal is followed
in their place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from redis.exceptions import RedisError

from controller.ledger.events import from_json, record_of
from controller.rest.event_history import EventHistory
from controller.rest.metric_store import MetricStore
from controller.rest.redaction import Redactor
from controller.store.journal import START, Entry
from paceline.run_view.file_tail import FileTail
from paceline.run_view.run_file_writer import is_listed

if TYPE_CHECKING:
    from controller.replicated_controller import Controller

log = logging.getLogger(__name__)

T = TypeVar("T")

FRESH_S = 0.2
MOST_EVALS = 20_000
# A commit's line repeats the step's metrics, which metrics.jsonl has: it is not parsed.
_COMMIT = re.compile(
    rb'^\{"position":"([^"]*)","n":(\d+),"t":([\d.]+),"type":"StepCommitted","step":(\d+)'
)
_REWARD = re.compile(rb'"reward_mean":(-?[\d.e+-]+)')


class RunIndex:
    """Columns of metrics, evaluations and events of one run."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._scrub = Redactor(controller.run_dir)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rest-index")
        self._metrics = FileTail(controller.run_dir / "metrics.jsonl")
        self._events = FileTail(controller.run_dir / "events.jsonl")
        self._from_files: bool | None = None
        self._journal_at = START
        self._journal_n: dict[str, int] = {}
        self._looked = -FRESH_S
        self._following = asyncio.Lock()
        self._reset()

    columns: MetricStore
    history: EventHistory
    evals: list[dict[str, Any]]

    async def ask(self, question: Callable[[RunIndex], T]) -> T:
        """Runs ``question`` in the index's thread once the index is as new as the files."""
        loop = asyncio.get_running_loop()
        has_files = await loop.run_in_executor(self._pool, self._refresh)
        if not has_files:
            await self._follow_journal()
        return await loop.run_in_executor(self._pool, question, self)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- in the index's thread ------------------------------------------------------------

    def _reset(self) -> None:
        self._reset_metrics()
        self.history = EventHistory(self._scrub.value)

    def _reset_metrics(self) -> None:
        self.columns = MetricStore()
        self.evals = []

    def _refresh(self) -> bool:
        """Reads what the files have more; False where there are none."""
        now = time.monotonic()
        if now - self._looked < FRESH_S and self._from_files is not None:
            return self._from_files
        self._looked = now
        has_files = self._metrics.exists or self._events.exists
        if has_files != self._from_files:
            self._from_files = has_files
            self._journal_at = START
            self._reset()
        if has_files:
            self._read_metrics()
            self._read_events()
        return has_files

    def _read_metrics(self) -> None:
        while True:
            void, lines = self._metrics.read()
            if void:
                self._reset_metrics()
            for line in lines:
                if (row := _parsed(line)) is not None:
                    self._measure(row)
            if not lines:
                return

    def _read_events(self) -> None:
        while True:
            void, lines = self._events.read()
            if void:
                self.history = EventHistory(self._scrub.value)
            for line in lines:
                if commit := _COMMIT.match(line):
                    position, n, t, step = commit.groups()
                    found = _REWARD.search(line)
                    reward = float(found[1]) if found else None
                    self.history.committed(position.decode(), int(n), float(t), int(step), reward)
                elif (event := _parsed(line)) is not None and "position" in event:
                    self.history.add(
                        str(event["position"]), int(event["n"]), float(event["t"]), event
                    )
            if not lines:
                return

    def _measure(self, row: dict[str, Any]) -> None:
        if row.get("kind", "step") == "step":
            self.columns.append(row)
            return
        step = int(row["step"])
        self.evals = (
            [e for e in self.evals if e["step"] != step] if self._knows(step) else self.evals
        )
        values = ("version", "t", "eval_reward_mean", "eval_count")
        self.evals.append({"step": step, **{k: row.get(k) for k in values}})
        del self.evals[:-MOST_EVALS]

    def _knows(self, step: int) -> bool:
        return bool(self.evals) and self.evals[-1]["step"] >= step

    # ---- without files ----------------------------------------------------------------------

    async def _follow_journal(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._following:
            try:
                while entries := await self._controller.journal.scan(self._journal_at):
                    await loop.run_in_executor(self._pool, self._take, entries)
                    self._journal_at = entries[-1].at.entry
            except (RedisError, OSError) as error:
                log.debug("journal not read error=%s", type(error).__name__)

    def _take(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            for n, event in enumerate(entry.events):
                record = record_of(from_json(event), event)
                self._take_event(entry.at.entry, n, entry.t, dict(record))

    def _take_event(self, position: str, n: int, t: float, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "StepCommitted":
            metrics = dict(event.get("metrics") or {})
            self._measure({**metrics, "t": t, "step": event["step"], "version": event["version"]})
            reward = metrics.get("reward_mean")
            self.history.committed(position, n, t, int(event["step"]), reward)
            return
        if kind == "EvalRecorded":
            self._measure(
                {
                    "kind": "eval",
                    "t": t,
                    "step": event["step"],
                    "version": event["version"],
                    "eval_reward_mean": event["reward_mean"],
                    "eval_count": event["count"],
                }
            )
        if is_listed(event):
            self.history.add(position, n, t, event)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
