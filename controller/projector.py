"""Projection of the run in a thread of its own, so that the event loop, which serves the fleet,
does
not wait for it.

    durable entry ──post──► waits ──────────┐
    request ────────ask───────────────► thread: fold what waits, then answer

Nothing is folded before somebody asks, or before ``MOST_WAITING`` entries wait: a thread that is
woken for every entry would compete with the event loop for the interpreter.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from controller.store.journal import LedgerSnapshot
from controller.store.ledger_follower import totals_of
from paceline.masking import Redactor
from paceline.observe.curves import RATE_STEPS
from paceline.observe.projection import Projection

T = TypeVar("T")

MOST_WAITING = 512
PATIENCE_S = 0.3
"""Longest wait for a glance at a long run whose file is still read; then the last one counts."""


@dataclass(frozen=True, slots=True)
class Glance:
    """Extract of the projection that the status of the run shows."""

    steps: Sequence[Mapping[str, Any]] = ()  # Rows of the newest committed steps, oldest first
    faults: str = ""  # In a sentence; empty: there were none
    reward_trouble: str = ""


class Projector:
    """``inline``: without a thread, for virtual time."""

    def __init__(self, run_dir: Path, *, inline: bool = False) -> None:
        self._run_dir = run_dir
        self._clean = Redactor(run_dir).value
        self._projection = Projection(self._clean)
        self._waiting: list[tuple[str, float, Sequence[Mapping[str, Any]]]] = []
        self._pool = None if inline else ThreadPoolExecutor(1, thread_name_prefix="projection")
        self._glancing: asyncio.Task[Glance] | None = None
        self.glance = Glance()  # As of the last ``look``

    # ---- feeding --------------------------------------------------------------------------

    def begin(self, snapshot: LedgerSnapshot | None) -> bool:
        """Begins anew: from the run's file, and from the snapshot that the ledger is loaded from.
        Returns whether there is no such file, as on another machine than the leader's."""
        self._waiting.clear()
        self._submit(lambda: self._load(snapshot))
        return not (self._run_dir / "events.jsonl").is_file()

    def hold(self, projection: Projection) -> None:
        """Answers from a projection that nothing is added to."""
        self._submit(lambda: setattr(self, "_projection", projection))

    def _load(self, snapshot: LedgerSnapshot | None) -> None:
        self._projection = Projection(self._clean)
        self._projection.read_history(self._run_dir)
        if snapshot is not None:
            self._projection.restore(totals_of(snapshot), snapshot.at.entry)

    def post(self, position: str, t: float, records: Sequence[Mapping[str, Any]]) -> None:
        """Takes a durable entry; returns at once."""
        self._waiting.append((position, t, records))
        if len(self._waiting) >= MOST_WAITING:
            self.begin_ask(lambda projection: None)

    # ---- answering ------------------------------------------------------------------------

    def begin_ask(self, question: Callable[[Projection], T]) -> Future[T]:
        """The answer to come, with all that was posted so far and nothing that is posted later."""
        entries, self._waiting = self._waiting, []

        def answer() -> T:
            for position, t, records in entries:
                self._projection.take(position, t, records)
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
