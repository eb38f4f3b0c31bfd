"""Rows of JSONL files, read without pyarrow: its import would slow down a controller's start."""

import hashlib
import json
import os
from array import array
from pathlib import Path

from paceline.dataset.row_source import DataError, Row, RowSource


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
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8 text"
            hint = "; one JSON object per line is expected" if number == 1 else ""
            raise DataError(f"{self.where}:{number}: bad JSON: {reason}{hint}") from None
        if not isinstance(row, dict):
            raise DataError(f"{self.where}:{number}: not a JSON object; one per line is expected")
        return row

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

    def lacking(self, field: str) -> str | None:
        known = field in self.fields
        return None if known else f"{self.where}:{self._lacking.get(field, 1)}"
