"""The row source, a sequence of data set rows that stays on disk; and rows of JSONL files, read
without pyarrow: its import would slow down a controller's start."""

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from paceline.errors import BadInput

Row = dict[str, Any]


class DataError(BadInput):
    """The data set cannot be used. ``remedy``: a sentence of the message, if there is one."""

    def __init__(self, found: str, remedy: str = "") -> None:
        super().__init__(f"{found}. {remedy}" if remedy else found)
        self.found, self.remedy = found, remedy


class RowSource(ABC):
    """A sequence of rows that stays on disk. Safe to read from several threads."""

    digest: str
    """32 hexadecimal digits; equal if the rows are equal and stored in the same format."""
    fields: Sequence[str]
    """Names that every row has."""
    where: str
    """File, directory or hub name, for error messages."""

    renamed: Mapping[str, str] = {}
    """The name of a field in this source, by the one that all sources of a run have for it."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, index: int) -> Row: ...

    def __getitem__(self, index: int) -> Row:
        """The row at ``index``, 0 to len - 1, in values that JSON can hold. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = self._read(index)
        if self.renamed:
            row |= {name: row[own] for name, own in self.renamed.items() if own in row}
        return row

    def as_json(self, index: int) -> str:
        """The row at ``index`` as a JSON object, in text that a message can carry. What one row
        holds, or has become since it was scanned, may raise anything; a note names the row."""
        try:
            text = json.dumps(self[index], ensure_ascii=False)
            text.encode()
        except Exception as error:
            error.add_note(f"row {index} of {self.where}")
            raise
        return text

    def lacking(self, field: str) -> str | None:
        """Location of the first row without ``field``; None if all rows have it."""
        field = self.renamed.get(field, field)
        return None if field in self.fields else self._first_without(field)

    def _first_without(self, field: str) -> str | None:
        return self.where


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

    def _first_without(self, field: str) -> str | None:
        places = (part.lacking(field) for part in self._parts)
        return next((place for place in places if place is not None), None)


_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""A possible half of a surrogate pair, as an escape or in bytes. Only such rows are encoded again:
it costs time."""


class JsonLines(RowSource):
    """One JSON object per line. Opening parses all lines, so that a bad one fails the start of a
    run; then only the offsets of rows are held."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._starts = array("Q")
        self._lacking: dict[str, int] = {}
        digest = hashlib.blake2b(digest_size=16)
        try:
            # Kept open: replacing the file during the run must not change the rows of the run.
            self._file = path.open("rb", buffering=1 << 20)
            self._scan(digest)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        if not self._starts:
            raise DataError(f"{path}: has no rows")
        self.digest = digest.hexdigest()

    def _scan(self, digest: hashlib.blake2b) -> None:
        offset = 0
        fields: list[str] = []
        for number, line in enumerate(self._file, start=1):
            start, offset = offset, offset + len(line)
            digest.update(line)
            if not line.strip():
                continue
            row = self._parse(line, number)
            if not self._starts:
                fields = list(row)
            for field in fields:
                if field not in row:
                    self._lacking.setdefault(field, number)
            self._starts.append(start)
        self.fields = [field for field in fields if field not in self._lacking]
        self._end = offset

    def _parse(self, line: bytes, number: int) -> Row:
        problem = "not a JSON object"
        try:
            row = json.loads(line)
            if _HALF_PAIR.search(line):
                json.dumps(row, ensure_ascii=False).encode()
            if isinstance(row, dict):
                return row
        except UnicodeEncodeError:
            problem = (
                "half a surrogate pair (as \\ud83d alone), which is no character and cannot be "
                "encoded. Remove it, or write the whole pair (\\ud83d\\ude00)"
            )
        except UnicodeDecodeError:
            problem = "bad JSON: not UTF-8 text"
        except (ValueError, RecursionError) as error:
            problem = f"bad JSON: {getattr(error, 'msg', error)}"
        hint = "; one JSON object per line is expected" if number == 1 else ""
        raise DataError(f"{self.where}:{number}: {problem}{hint}")

    def __len__(self) -> int:
        return len(self._starts)

    def _read(self, index: int) -> Row:
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self._starts) else self._end
        # pread has no file position, so threads do not disturb one another.
        data = os.pread(self._file.fileno(), end - start, start)
        try:
            row: Row = json.loads(data)
        except ValueError:
            raise DataError(f"{self.where}: row {index} changed while the run used it") from None
        return row

    def _first_without(self, field: str) -> str:
        return f"{self.where}:{self._lacking.get(field, 1)}"
