"""Data set rows for leases, as JSON, with a cache of the latest ones. The data is opened in a
thread once the server is up: a large data set delays the first lease, but not the first reply."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from controller.ledger.enums import Kind
from controller.ledger.specs import LeasedTask
from paceline.config.schema import Config
from paceline.config.sections.evaluation import EvalSetConfig
from paceline.config.sections.inputs import DataConfig
from paceline.dataset.data_order import DataSource
from paceline.dataset.row_source import DataError
from paceline.dataset.rows import RowSource
from paceline.dataset.training_rows import load_rows_of, open_training_rows
from paceline.process.threads import in_daemon_thread
from paceline.process.waits import WaitKind, waiting

CACHED_ROWS = 4096
CACHED_BYTES = 8 << 20
READERS = 16  # Reads at once. On a dead mount no more threads than these hang.

_Key = tuple[Kind, str, int]


class DatasetRows:
    """Training and held-out rows of a run. ``sets``: those of [evaluation.sets], by name."""

    def __init__(
        self,
        train: RowSource,
        held_out: RowSource | None,
        sets: Mapping[str, RowSource] | None = None,
        sources: tuple[DataSource, ...] = (),
    ) -> None:
        self.sources = sources
        self._sets = dict(sorted((sets or {}).items()))
        self._sources = {(Kind.TRAIN, ""): train, (Kind.EVAL, ""): held_out}
        self._sources |= {(Kind.EVAL, name): source for name, source in self._sets.items()}
        self.train_rows = len(train)
        self.held_out_rows = len(held_out) if held_out is not None else 0
        self.digest = train.digest if held_out is None else f"{train.digest}+{held_out.digest}"
        for name, source in self._sets.items():
            self.digest += f"+{name}:{source.digest}"
        self._cache: OrderedDict[_Key, str] = OrderedDict()
        self._cached_bytes = 0
        self._reading = asyncio.Semaphore(READERS)
        self.path = ""

    @classmethod
    async def load(cls, config: Config) -> "DatasetRows":
        """Opens the data sets of ``config.data``. Raises DataError with the file and the remedy."""
        data = config.data
        limit_s, where = data.open_timeout_s, data.described
        with waiting(WaitKind.DATASET, f"opening the data set {where}", where, limit_s=limit_s):
            try:
                async with asyncio.timeout(limit_s):
                    rows = await in_daemon_thread(lambda: cls._load(config), "dataset")
            except TimeoutError:
                setting = "data.path" if data.path is not None else "data.sources"
                raise DataError(
                    f"{setting} = {where!r} could not be opened within {limit_s:g} s: check the "
                    "mount or the network behind it, or raise data.open_timeout_s"
                ) from None
        rows.path = where
        return rows

    @classmethod
    def _load(cls, config: Config) -> "DatasetRows":
        data = config.data
        train, sources = open_training_rows(data)
        held_out = None
        if data.eval_path is not None:
            held_out = load_rows_of(data.eval_path, data, name=data.name, split=data.eval_split)
        sets = {name: _open_set(name, of, data) for name, of in config.evaluation.sets.items()}
        return cls(train, held_out, sets, sources)

    def eval_rows(self, name: str) -> int:
        return len(self._sets[name])

    async def of(self, leases: Sequence[LeasedTask]) -> list[str | Exception]:
        """Each task's row as a JSON object, in order; or why that row cannot be given."""
        return await self._of([(lease.kind, lease.eval_set, lease.index) for lease in leases])

    async def held_out(self, first: int, end: int) -> list[str]:
        """Held-out rows as JSON objects, in order: those from ``first`` to before ``end``. One that
        cannot be given is empty: who reads it leaves out what is malformed."""
        rows = await self._of([(Kind.EVAL, "", index) for index in range(first, end)])
        return ["{}" if isinstance(row, Exception) else row for row in rows]

    async def _of(self, keys: Sequence[_Key]) -> list[str | Exception]:
        # Copied before the wait: meanwhile other requests may evict these rows from the cache.
        rows: dict[_Key, str | Exception] = {k: self._cache[k] for k in keys if k in self._cache}
        for key in rows:
            self._cache.move_to_end(key)
        if missing := set(keys) - rows.keys():
            # In a thread: the disk may be slow, and the leader has a lease to renew.
            with waiting(WaitKind.DATASET, f"reading rows of {self.path}", self.path):
                async with self._reading:
                    found = await in_daemon_thread(lambda: self._read(missing), "rows")
            for key, row in found.items():
                if isinstance(row, str):
                    self._remember(key, row)
            rows |= found
        return [rows[key] for key in keys]

    def _read(self, keys: set[_Key]) -> dict[_Key, str | Exception]:
        found: dict[_Key, str | Exception] = {}
        for kind, name, index in keys:
            source = self._sources[kind, name]
            assert source is not None
            # Whatever is wrong with one row fails that row alone.
            try:
                found[kind, name, index] = source.as_json(index)
            except Exception as error:
                found[kind, name, index] = error
        return found

    def _remember(self, key: _Key, row: str) -> None:
        if key not in self._cache:
            self._cached_bytes += len(row)
        self._cache[key] = row
        while len(self._cache) > CACHED_ROWS or self._cached_bytes > CACHED_BYTES:
            _, old = self._cache.popitem(last=False)
            self._cached_bytes -= len(old)


def _open_set(name: str, of: EvalSetConfig, data: DataConfig) -> RowSource:
    try:
        return load_rows_of(of.path, of.data(data), name=of.name, split=of.split)
    except DataError as error:
        raise DataError(f"evaluation.sets.{name}: {error}") from None
