"""Limits of bulk transfer to and from Redis: large values in slices, each with a time limit that
grows with its size.

One reply to 0.5 GB of payloads takes seconds: with one limit for every size it would time out, and
the same request would be repeated unchanged for ever. A slice of 8 MiB needs 4 MB/s of Redis to
arrive in time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

SLICE_BYTES = 8 << 20
"""Several values go together up to this size; a larger one goes alone."""
ANSWER_S = 2.0
LEAST_BYTES_PER_S = 4_000_000
"""Redis and the network are expected to be at least so fast."""


def limit_s(size: int) -> float:
    """Time limit of a request, or of a reply, of ``size`` bytes."""
    return ANSWER_S + size / LEAST_BYTES_PER_S


def in_time(size: int) -> AbstractAsyncContextManager[object]:
    """Raises TimeoutError if the block takes longer than a transfer of ``size`` bytes may."""
    return asyncio.timeout(limit_s(size))


MOST_PATIENCE = 16.0
"""Times its usual limit that a request may take at most: 250 kB/s, and 32 s for a small one."""


class Patience:
    """Time limits of requests of one kind. One that runs out of time is repeated with twice as
    much: on a slow store the same limit would end every attempt. Requests that need a quarter of
    their time at most make it shorter again, so each kind has its own: a store that answers small
    questions at once may send slowly."""

    def __init__(self) -> None:
        self.factor = 1.0

    @asynccontextmanager
    async def in_time(self, size: int) -> AsyncIterator[None]:
        """Raises TimeoutError if the block takes longer than a transfer of ``size`` bytes may."""
        allowed_s, began = self.factor * limit_s(size), time.monotonic()
        try:
            async with asyncio.timeout(allowed_s):
                yield
        except TimeoutError:
            self.factor = min(2 * self.factor, MOST_PATIENCE)
            raise
        if time.monotonic() - began < allowed_s / 4:
            self.factor = max(self.factor / 2, 1.0)


T = TypeVar("T")


def slices(sized: Iterable[tuple[T, int]], most: int) -> Iterator[list[T]]:
    """Items in their order, in slices of at most ``most`` bytes; a larger item is a slice of its
    own."""
    part: list[T] = []
    total = 0
    for item, size in sized:
        if part and total + size > most:
            yield part
            part, total = [], 0
        part.append(item)
        total += size
    if part:
        yield part
