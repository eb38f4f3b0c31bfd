"""Moment of a collection: its values as they were when it was taken, while they go on changing.

A copy of a million records would stop the leader for seconds. Taking the moment copies references
alone; the owner of the collection says ``keep`` before it changes a value, and a copy of the value
as it was is kept until the moment is over.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class Moment(Generic[V]):
    """``values``, as ``encode`` writes them, as they were when this object was made. ``key``: never
    changes."""

    def __init__(
        self, values: Iterable[V], key: Callable[[V], str], encode: Callable[[V], Any]
    ) -> None:
        self._values = list(values)
        self._key, self._encode = key, encode
        self._kept: dict[int, V] = {}
        """By the id of the value that has changed since; ``_values`` keeps that alive."""
        self.over = False
        """All were read, or nobody wants to read them: nothing needs to be kept any more."""

    def keep(self, value: V) -> None:
        """``value`` is about to change. The first time counts."""
        if not self.over and id(value) not in self._kept:
            self._kept[id(value)] = copy(value)

    def items(self) -> Iterator[tuple[str, Any]]:
        """(key, encoded value) in the order of ``values``."""
        for value in self._values:
            yield self._key(value), self._encode(self._kept.get(id(value), value))

    def close(self) -> None:
        self.over = True
        self._kept.clear()
