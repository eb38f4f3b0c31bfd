"""Data set rows for leases, as JSON, with a cache of the latest ones.

The data is opened in a thread once the server is up: a large data set delays the first lease, but
not the first reply.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence

from controller.ledger.commands import Kind, LeasedTask
from paceline.config.schema import Config
from paceline.dataset.row_source import DataError
from paceline.dataset.rows import RowSource, check_rows, load_rows
from paceline.process.daemon_call import in_daemon_thread
from paceline.process.waits import WaitKind, waiting

CACHED_ROWS = 4096
CACHED_BYTES = 8 << 20
READERS = 16
"""Reads at once. On a dead mount no more threads than these hang."""


class DatasetRows:
    """Training and held-out rows of a run."""

    def __init__(self, train: RowSource, held_out: RowSource | None) -> None:
        self._sources = {Kind.TRAIN: train, Kind.EVAL: held_out}
        self.train_rows = len(train)
        self.held_out_rows = len(held_out) if held_out is not None else 0
        self.digest = train.digest if held_out is None else f"{train.digest}+{held_out.digest}"
        self._cache: OrderedDict[tuple[Kind, int], str] = OrderedDict()
        self._cached_bytes = 0
        self._reading = asyncio.Semaphore(READERS)
        self.path = ""
        """``data.path``, for people."""

    @classmethod
    async def load(cls, config: Config) -> DatasetRows:
        """Opens the data sets of ``config.data``. Raises DataError with the file and the remedy."""
        data = config.data
        limit_s = data.open_timeout_s
        what = f"opening the data set {data.path}"
        with waiting(WaitKind.DATASET, what, data.path, limit_s=limit_s):
            try:
                async with asyncio.timeout(limit_s):
                    rows = await in_daemon_thread(lambda: cls._load(config), "dataset")
            except TimeoutError:
                raise DataError(
                    f"data.path = {data.path!r} could not be opened within {limit_s:g} s: check the "
                    "mount or the network behind it, or raise data.open_timeout_s"
                ) from None
        rows.path = data.path
        return rows

    @classmethod
    def _load(cls, config: Config) -> DatasetRows:
        data = config.data
        train = load_rows(data.path, name=data.name, split=data.split)
        check_rows(train, data)
        held_out = None
        if data.eval_path is not None:
            held_out = load_rows(data.eval_path, name=data.name, split=data.eval_split)
            check_rows(held_out, data)
        return cls(train, held_out)

    async def of(self, leases: Sequence[LeasedTask]) -> list[str]:
        """Each task's row as a JSON object, in order."""
        keys = [(lease.kind, lease.index) for lease in leases]
        # Copied before the wait: meanwhile other requests may evict these rows from the cache.
        rows = {key: self._cache[key] for key in keys if key in self._cache}
        for key in rows:
            self._cache.move_to_end(key)
        missing = set(keys) - rows.keys()
        if missing:
            # In a thread: the disk may be slow, and the leader has a lease to renew.
            with waiting(WaitKind.DATASET, f"reading rows of {self.path}", self.path):
                async with self._reading:
                    found = await in_daemon_thread(lambda: self._read(missing), "rows")
            for key, row in found.items():
                self._remember(key, row)
            rows |= found
        return [rows[key] for key in keys]

    def _read(self, keys: set[tuple[Kind, int]]) -> dict[tuple[Kind, int], str]:
        found = {}
        for kind, index in keys:
            source = self._sources[kind]
            assert source is not None
            found[kind, index] = json.dumps(source[index], ensure_ascii=False)
        return found

    def _remember(self, key: tuple[Kind, int], row: str) -> None:
        if key not in self._cache:
            self._cached_bytes += len(row)
        self._cache[key] = row
        while len(self._cache) > CACHED_ROWS or self._cached_bytes > CACHED_BYTES:
            _, old = self._cache.popitem(last=False)
            self._cached_bytes -= len(old)
