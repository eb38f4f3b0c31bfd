"""Files of a run as they grow: its event file, and the logs of its processes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

CHUNK = 4 << 20


class FileTail:
    """Every complete line of a file once. A new leader copies the file up to its last complete line
    and appends to the copy. The tail continues in the copy at the same offset if the line before it
    is the one it read last, and otherwise begins anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._offset = 0  # of the next line, in bytes
        self._last = b""

    def read(self) -> list[bytes]:
        """The next lines: at most 4 MiB."""
        self._follow()
        if self._file is None:
            return []
        self._file.seek(self._offset)
        data = self._file.read(CHUNK)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) == CHUNK:
            end = len(data)  # no record is this long: skipped, as it does not parse
        lines = data[:end].splitlines()
        if lines:
            self._offset += end
            self._last = data[max(0, data.rfind(b"\n", 0, end - 1) + 1) : end]
        return lines

    def records(self) -> Iterator[dict[str, Any]]:
        """The JSON objects up to the end of the file; a line that cannot be parsed is skipped."""
        while lines := self.read():
            for line in lines:
                try:
                    value = json.loads(line)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield value

    def _follow(self) -> None:
        """Opens the file that has the name now."""
        try:
            named = self._path.stat()
            if self._file is not None:
                if os.path.samestat(os.fstat(self._file.fileno()), named) and (
                    named.st_size >= self._offset
                ):
                    return
                self._file.close()
            self._file = self._path.open("rb")
        except OSError:
            if self._file is not None:
                self._file.close()
            self._file, self._offset, self._last = None, 0, b""
            return
        self._file.seek(max(0, self._offset - len(self._last)))
        if self._offset > named.st_size or self._file.read(len(self._last)) != self._last:
            self._offset, self._last = 0, b""


def log_files(run_dir: Path) -> dict[str, Path]:
    """Log file of each process, by process name; that of Redis is ``redis``."""
    found = {path.stem: path for path in sorted((run_dir / "logs").glob("*.log"))}
    redis = run_dir / "redis" / "redis.log"
    if redis.is_file():
        found.setdefault("redis", redis)
    return found
