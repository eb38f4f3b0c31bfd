"""In-memory index of the run files, updated as they grow.

It lives in a thread of its own, so that the event loop, which serves the fleet, does not wait for
it. A standby on another machine has no run files: it follows the journal instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from redis.exceptions import RedisError

from controller.ledger.events import from_json, record_of
from controller.replicated_controller import Controller
from controller.rest.redaction import Redactor
from controller.store.journal import START, Entry
from paceline.observe.run_records import RunRecords

log = logging.getLogger(__name__)

T = TypeVar("T")

FRESH_S = 0.2


class RunIndex:
    """Answers questions about the run's metrics, evaluations and events."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._records = RunRecords(controller.run_dir, Redactor(controller.run_dir).value)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rest-index")
        self._from_files: bool | None = None
        self._journal_at = START
        self._refreshed = -FRESH_S
        self._following = asyncio.Lock()

    async def ask(self, question: Callable[[RunRecords], T]) -> T:
        """Runs ``question`` in the index's thread, once the index is as new as the files."""
        loop = asyncio.get_running_loop()
        has_files = await loop.run_in_executor(self._pool, self._refresh)
        if not has_files:
            await self._follow_journal()
        return await loop.run_in_executor(self._pool, question, self._records)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _refresh(self) -> bool:
        """Reads what was added to the files; False if there are none."""
        now = time.monotonic()
        if now - self._refreshed < FRESH_S and self._from_files is not None:
            return self._from_files
        self._refreshed = now
        has_files = self._records.has_files
        if has_files != self._from_files:
            self._from_files = has_files
            self._journal_at = START
            self._records.reset()
        if has_files:
            self._records.refresh()
        return has_files

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
                self._records.add(entry.at.entry, n, entry.t, record)
