"""The row source: a sequence of data set rows that stays on disk."""

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from paceline.errors import BadInput

Row = dict[str, Any]


class DataError(BadInput):
    """The data set cannot be used."""


class RowSource(ABC):
    """A sequence of rows that stays on disk. Safe to read from several threads."""

    digest: str
    """32 hexadecimal digits; equal if the rows are equal and stored in the same format."""
    fields: Sequence[str]
    """Names that every row has."""
    where: str
    """File, directory or hub name, for error messages."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, index: int) -> Row: ...

    def __getitem__(self, index: int) -> Row:
        """The row at ``index``, 0 to len - 1, in values that JSON can hold. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._read(index)

    def lacking(self, field: str) -> str | None:
        """Location of the first row without ``field``; None if all rows have it."""
        return None if field in self.fields else self.where


class Concatenated(RowSource):
    """Several sources, one after the other."""

    def __init__(self, parts: Sequence[RowSource], where: str) -> None:
        self.where = where
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))
        self.fields = [f for f in parts[0].fields if all(f in part.fields for part in parts)]
        digests = " ".join(part.digest for part in parts)
        self.digest = hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def _read(self, index: int) -> Row:
        part = bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]

    def lacking(self, field: str) -> str | None:
        places = (part.lacking(field) for part in self._parts)
        return next((place for place in places if place is not None), None)
