"""Row sampler: a task's row and sampling seed, as pure functions of seed and ordinal.

Without a library's random numbers: controllers of every machine and Python have the same order.
"""

from functools import lru_cache

_MASK = (1 << 64) - 1
_SMALL = 4096
"""Rows up to which an epoch's permutation is a shuffled list; above, it is computed per row."""


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
    """(epoch, row) of the ``ordinal``-th task, all from 0. Each epoch visits each row once."""
    if rows < 1 or ordinal < 0:
        raise ValueError(f"no row for task {ordinal} of a data set with {rows} rows")
    epoch, position = divmod(ordinal, rows)
    if not shuffle or rows == 1:
        return epoch, position
    if rows <= _SMALL:
        return epoch, _shuffled(seed, epoch, rows)[position]
    return epoch, _permute(seed, epoch, rows, position)


def task_seed(seed: int, task_id: str) -> int:
    """Sampling seed of a task, 64 bits: equal for every attempt, different for every task."""
    raw = task_id.encode()
    words = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]
    return mix(seed, len(raw), *words)


@lru_cache(maxsize=8)
def _shuffled(seed: int, epoch: int, rows: int) -> tuple[int, ...]:
    order = list(range(rows))
    for i in range(rows - 1, 0, -1):
        j = mix(seed, epoch, i) % (i + 1)
        order[i], order[j] = order[j], order[i]
    return tuple(order)


def _permute(seed: int, epoch: int, rows: int, position: int) -> int:
    """A Feistel network over the next power of two, repeated until it lands inside the data set."""
    bits = (rows - 1).bit_length()
    right_bits = bits // 2
    left_bits = bits - right_bits
    left_mask, right_mask = (1 << left_bits) - 1, (1 << right_bits) - 1
    keys = _keys(seed, epoch)
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
def _keys(seed: int, epoch: int) -> tuple[tuple[int, int], ...]:
    return tuple((mix(seed, epoch, n, 0), mix(seed, epoch, n, 1)) for n in range(3))
