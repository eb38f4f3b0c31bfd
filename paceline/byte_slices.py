"""Slices of bounded size: many messages that no single request or command could carry."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

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
