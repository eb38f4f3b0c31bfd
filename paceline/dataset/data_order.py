"""Data order: row and sampling seed of every task, over one source or a mixture of several.

Pure functions of the seed, the number of the task, and the sources, without a library's random
numbers: controllers of every machine and Python compute the same order.

- One source: each pass visits each row once (task_row).
- Sources without weights: one data set, the sources one after the other. Each pass visits each row
  of each source once.
- Sources with weights: of every ``BLOCK`` tasks, ``share`` are of a source, in an order that the
  seed decides. Each source has an order and passes of its own, so a small source with a large
  weight is visited more often.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

_MASK = (1 << 64) - 1
_SMALL = 4096
"""Rows up to which a pass's permutation is a shuffled list; above, it is computed per row."""


def mix(*values: int) -> int:
    """A well-mixed 64-bit hash of integers (splitmix64's finaliser, chained)."""
    h = 0x243F6A8885A308D3
    for value in values:
        h = (h ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
        h ^= h >> 31
    return h


def task_row(seed: int, ordinal: int, rows: int, shuffle: bool) -> tuple[int, int]:
    """(pass, row) of the ``ordinal``-th task, all from 0. Each pass visits each row once."""
    if rows < 1 or ordinal < 0:
        raise ValueError(f"no row for task {ordinal} of a data set with {rows} rows")
    dataset_pass, position = divmod(ordinal, rows)
    if not shuffle or rows == 1:
        return dataset_pass, position
    if rows <= _SMALL:
        return dataset_pass, _shuffled(seed, dataset_pass, rows)[position]
    return dataset_pass, _permute(seed, dataset_pass, rows, position)


def task_seed(seed: int, task_id: str) -> int:
    """Sampling seed of a task, 64 bits: equal for every attempt, different for every task."""
    raw = task_id.encode()
    words = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]
    return mix(seed, len(raw), *words)


def _shuffle(order: list[int], *seeds: int) -> None:
    for i in range(len(order) - 1, 0, -1):
        j = mix(*seeds, i) % (i + 1)
        order[i], order[j] = order[j], order[i]


@lru_cache(maxsize=8)
def _shuffled(seed: int, dataset_pass: int, rows: int) -> list[int]:
    order = list(range(rows))
    _shuffle(order, seed, dataset_pass)
    return order


def _permute(seed: int, dataset_pass: int, rows: int, position: int) -> int:
    """A Feistel network over the next power of two, repeated until it lands inside the data set."""
    bits = (rows - 1).bit_length()
    right_bits = bits // 2
    left_bits = bits - right_bits
    left_mask, right_mask = (1 << left_bits) - 1, (1 << right_bits) - 1
    keys = _keys(seed, dataset_pass)
    left, right = position >> right_bits, position & right_mask
    while True:
        for one, other in keys:
            h = (right + one) * 0xBF58476D1CE4E5B9 & _MASK
            left ^= ((h ^ h >> 31) * 0x94D049BB133111EB & _MASK) >> 32 & left_mask
            h = (left + other) * 0xBF58476D1CE4E5B9 & _MASK
            right ^= ((h ^ h >> 31) * 0x94D049BB133111EB & _MASK) >> 32 & right_mask
        value = left << right_bits | right
        if value < rows:
            return value


@lru_cache(maxsize=8)
def _keys(seed: int, dataset_pass: int) -> tuple[tuple[int, int], ...]:
    return tuple((mix(seed, dataset_pass, n, 0), mix(seed, dataset_pass, n, 1)) for n in range(3))


BLOCK = 1000
"""Tasks among which every source has exactly its share: weights are rounded to a thousandth."""
_MIXTURE = 0x736F7572636573
"""Keeps the random numbers of a mixture apart from those of rows."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """One source of a mixture. Its rows are numbered after those of the source before it."""

    compact = True

    name: str
    rows: int
    share: int = 0
    """Tasks of each ``BLOCK``. 0 for all sources: they have no weights."""


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Shares of ``BLOCK`` in proportion to ``weights``, by largest remainder; a positive weight has
    at least 1."""
    total = sum(weights)
    exact = [BLOCK * weight / total for weight in weights]
    found = [max(int(x), int(x > 0)) for x in exact]
    by_remainder = sorted(range(len(found)), key=lambda n: (found[n] - exact[n], n))
    for n in by_remainder[: max(0, BLOCK - sum(found))]:
        found[n] += 1
    while sum(found) > BLOCK:  # shares that were raised to 1 are taken from the largest
        found[found.index(max(found))] -= 1
    return tuple(found)


@dataclass(frozen=True)
class DataOrder:
    """``rows``: of all sources. ``sources``: none if there is one source without a name."""

    seed: int
    rows: int
    shuffle: bool
    sources: tuple[DataSource, ...] = ()

    @property
    def weighted(self) -> bool:
        return any(source.share for source in self.sources)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources) or ("",)

    def place(self, ordinal: int) -> tuple[int, int]:
        """(pass, row) of a task; with weights, the pass is that of the source."""
        if not self.weighted:
            return task_row(self.seed, ordinal, self.rows, self.shuffle)
        block, position = divmod(ordinal, BLOCK)
        order, positions = self._block(block)
        number = order[position]
        source = self.sources[number]
        earlier = block * source.share + bisect_left(positions[number], position)
        seed = mix(self.seed, _MIXTURE, number)
        dataset_pass, row = task_row(seed, earlier, source.rows, self.shuffle)
        return dataset_pass, _ends(self.sources)[number] - source.rows + row

    def source_of(self, row: int) -> int:
        """Number of the source that has ``row``."""
        return bisect_right(_ends(self.sources), row) if self.sources else 0

    def _block(self, number: int) -> tuple[list[int], list[list[int]]]:
        return _block(self.seed, number, tuple(source.share for source in self.sources))


@lru_cache(maxsize=16)
def _block(seed: int, block: int, counts: tuple[int, ...]) -> tuple[list[int], list[list[int]]]:
    """The source of each position of a block, and the positions of each source."""
    order = [number for number, count in enumerate(counts) for _ in range(count)]
    _shuffle(order, seed, _MIXTURE, block)
    positions: list[list[int]] = [[] for _ in counts]
    for position, number in enumerate(order):
        positions[number].append(position)
    return order, positions


@lru_cache(maxsize=16)
def _ends(sources: tuple[DataSource, ...]) -> list[int]:
    return list(accumulate(source.rows for source in sources))
