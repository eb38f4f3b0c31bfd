"""Group commit: all events decided during one append go to the journal in the next append.

    ledger ──events──► open batch ──flush──► Redis ──► waiters, projector, what on_flush returned

- Only one append is under way at a time. Events decided meanwhile form the next batch.
- Waiters resume only once the batch is durable.
- If Redis does not answer or is full, the same batch is repeated, and callers wait in ``flowing``.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from controller.ledger.events import Event, to_json
from controller.runtime import SYSTEM_CLOCK, Clock
from controller.store.journal import Entry, Journal, Position, RedisFull
from controller.store.ledger_follower import LedgerFollower
from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from paceline.redis.client import log_fields, trouble_of

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.02
LAST_RETRY_S = 0.5
CROWD = 4
LINGER_S = 0.002
APPEND_SHARE = 0.05  # Weight of the newest append in the moving average


@dataclass(slots=True, eq=False)
class CommitBatch:
    """Events decided between two flushes."""

    events: list[Event] = field(default_factory=list)
    waiters: list[asyncio.Future[None]] = field(default_factory=list)


class GroupCommit:
    def __init__(
        self,
        journal: Journal,
        replica: LedgerFollower,
        *,
        term: int,
        on_flush: Callable[[Sequence[Event]], Callable[[Entry], None]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Goes on where ``replica`` stands, with its ledger and projector. ``on_flush`` runs when a
        batch is closed, with the ledger exactly at the batch's end. It returns what is done
        once the batch is durable."""
        self._journal = journal
        self._term = term
        self._ledger, self._projector = replica.ledger, replica.projector
        self.at = replica.at  # Position of the newest batch that is durable
        self._on_flush = on_flush
        self._clock = clock
        self._open = CommitBatch()
        self._inflight: CommitBatch | None = None
        self._wanted = asyncio.Event()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.append_s = 0.0  # Duration of an append, moving average. Seconds.
        self.trouble = ""  # Reason for which appends fail now, for people. Empty: they succeed.

    def gather(self) -> None:
        """Takes what has been decided on the ledger into the next batch."""
        if events := self._ledger.take_events():
            self._open.events.extend(events)
            self._wanted.set()

    async def flowing(self) -> None:
        """Waits while Redis does not answer or is full."""
        await self._flowing.wait()

    async def durable(self) -> None:
        """Waits until all events added so far are durable."""
        batch = self._open if self._open.events else self._inflight
        if batch is None:
            return
        waiter = asyncio.get_running_loop().create_future()
        batch.waiters.append(waiter)
        await waiter

    async def run(self) -> None:
        """Flushes until cancelled. Raises Deposed."""
        while True:
            await self._wanted.wait()
            # Tasks that are ready to run decide first, so that their events join this batch. If
            # many wait already, more will follow: one larger batch is then faster than two.
            crowded = len(self._open.waiters) >= CROWD
            await asyncio.sleep(LINGER_S if crowded else 0)
            self._wanted.clear()
            if self._open.events:
                await self._flush()

    async def _flush(self) -> None:
        batch, self._open = self._open, CommitBatch()
        self._inflight = batch
        t = self._clock.time()
        when_durable = self._on_flush(batch.events)
        events = [to_json(e) for e in batch.events]
        with waiting(WaitKind.STORE, "appending to the journal", "Redis"):
            self.at = await self._append(t, events)
        self._inflight = None
        for waiter in batch.waiters:
            if not waiter.done():
                waiter.set_result(None)
        entry = Entry(self.at, self._term, t, events, batch.events)
        if self._projector is not None:
            self._projector.post(entry.at.entry, entry.t, entry.records)
        when_durable(entry)

    async def _append(self, t: float, events: Sequence[Mapping[str, Any]]) -> Position:
        # Unique, because a term is granted once and writes each number once.
        batch = f"{self._term}.{self.at.number + 1}"
        pause_s = FIRST_RETRY_S
        began = self._clock.monotonic()
        while True:
            try:
                position = await self._journal.append(
                    self.at, term=self._term, batch=batch, t=t, events=events
                )
            except (RedisFull, RedisError, OSError) as error:
                trouble = trouble_of(error)
                if self.trouble != trouble:
                    event(log, "appends do not go through", logging.WARNING, **log_fields(trouble))
                self.trouble = trouble
                self._flowing.clear()
            else:
                if self.trouble:
                    event(log, "appends go through again", was=self.trouble)
                    self.trouble = ""
                    self._flowing.set()
                took_s = self._clock.monotonic() - began
                self.append_s += APPEND_SHARE * (took_s - self.append_s)
                return position
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_RETRY_S)

    def abandon(self, error: Exception) -> None:
        """Raises ``error`` in all waiters, because this process no longer leads."""
        for batch in (self._inflight, self._open):
            for waiter in batch.waiters if batch is not None else ():
                if not waiter.done():
                    waiter.set_exception(error)
