"""Tail of a run file: every complete line once, even if a new leader replaces the file."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

CHUNK = 4 << 20


class FileTail:
    """Continues where the last read stopped. A new leader copies the file up to its last complete
    line and appends to the copy. The tail continues in the copy at the same offset if the line
    before it is the one it read last."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        """``offset``: of the first line to read, in bytes."""
        self._path = path
        self._file: BinaryIO | None = None
        self._offset = offset
        self._last = b""

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def read(self) -> tuple[bool, list[bytes]]:
        """(whether everything read before is void, the next lines: at most 4 MiB)."""
        void = self._follow()
        if self._file is None:
            return void, []
        self._file.seek(self._offset)
        data = self._file.read(CHUNK)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) == CHUNK:
            end = len(data)  # no record is this long: skipped, as it does not parse
        lines = data[:end].splitlines()
        if lines:
            self._offset += end
            self._last = data[max(0, data.rfind(b"\n", 0, end - 1) + 1) : end]
        return void, lines

    def rest(self) -> bytes:
        """Bytes after the last line that was read: a line without its end."""
        if self._file is None:
            return b""
        self._file.seek(self._offset)
        return self._file.read()

    def records(self) -> Iterator[tuple[bool, dict[str, Any]]]:
        """The JSON objects up to the end of the file; a line that cannot be parsed is skipped. The
        flag is True on the first object of a file that is no continuation: everything read before
        is void."""
        void = False
        while True:
            replaced, lines = self.read()
            void = void or replaced
            for line in lines:
                try:
                    value = json.loads(line)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield void, value
                    void = False
            if not lines:
                return

    def _follow(self) -> bool:
        """Opens the file that has the name now; True if it is not a continuation."""
        try:
            named = self._path.stat()
        except OSError:
            void = self._offset > 0
            self._close()
            return void
        if self._file is not None:
            held = os.fstat(self._file.fileno())
            if (held.st_ino, held.st_dev) == (named.st_ino, named.st_dev) and (
                named.st_size >= self._offset
            ):
                return False
            self._file.close()
        try:
            self._file = self._path.open("rb")
        except OSError:
            self._close()
            return True
        self._file.seek(max(0, self._offset - len(self._last)))
        if 0 < self._offset <= named.st_size and self._file.read(len(self._last)) == self._last:
            return False
        void = self._offset > 0
        self._offset, self._last = 0, b""
        return void

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._offset, self._last = None, 0, b""
