"""Log files of a run: names, last lines and new lines."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.observe.file_tail import FileTail

BLOCK = 1 << 16
LOOK_S = 0.2  # Polling interval: there is no portable way to wait for a file


def log_files(run_dir: Path) -> dict[str, Path]:
    """Log file of each process, by process name; that of Redis is ``redis``."""
    found = {path.stem: path for path in sorted((run_dir / "logs").glob("*.log"))}
    redis = run_dir / "redis" / "redis.log"
    if redis.is_file():
        found.setdefault("redis", redis)
    return found


def last_lines(path: Path, count: int) -> tuple[list[str], int]:
    """The last ``count`` complete lines and the offset after them, in bytes. Text after the last
    line end is left for the next reader. Reads only the end of the file. Raises OSError."""
    with path.open("rb") as file:
        at = file.seek(0, os.SEEK_END)
        data = b""
        while at > 0 and data.count(b"\n") <= count:
            size = min(BLOCK, at)
            at -= size
            file.seek(at)
            data = file.read(size) + data
        reached = data.rfind(b"\n") + 1
        lines = data[:reached].splitlines()
        return [_text(line) for line in lines[max(0, len(lines) - count) :]], at + reached


def new_lines(path: Path, offset: int, over: Callable[[], bool]) -> Iterator[str]:
    """Complete lines after ``offset`` as they are written, until ``over()`` and the end. Blocks. A
    file that is replaced or truncated is read from its beginning. At the end, a last line without a
    line end is returned too."""
    tail = FileTail(path, offset)
    while True:
        ending = over()  # before reading: lines written before the end are still read
        while lines := tail.read()[1]:
            yield from map(_text, lines)
        if ending:
            if rest := tail.rest():
                yield _text(rest)
            return
        time.sleep(LOOK_S)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
