"""New complete lines of a run file, each once, also when a new leader replaces the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

CHUNK = 4 << 20


class FileTail:
    """Reads on where it stopped.

    A new leader writes the file anew up to its last complete line and goes on. The copy is followed
    from the same place if the line before that place is the one that was read last.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._offset = 0
        self._last = b""

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def read(self) -> tuple[bool, list[bytes]]:
        """(whether everything read before is void, the next lines, at most some MiB of them)."""
        void = self._follow()
        if self._file is None:
            return void, []
        self._file.seek(self._offset)
        data = self._file.read(CHUNK)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) == CHUNK:
            end = len(data)  # no line of ours is so long: skipped, it does not parse
        lines = data[:end].splitlines()
        if lines:
            self._offset += end
            self._last = data[max(0, data.rfind(b"\n", 0, end - 1) + 1) : end]
        return void, lines

    def _follow(self) -> bool:
        """Opens the file that has the name now; True where it is not a continuation."""
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
        if self._offset and self._file.read(len(self._last)) == self._last:
            return False
        void = self._offset > 0
        self._offset, self._last = 0, b""
        return void

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._offset, self._last = None, 0, b""
