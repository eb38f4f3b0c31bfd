"""Append-only file of the embedded Redis after a power cut: its torn tail is cut.

What a file system had not written yet when the power went may come back as zeroes or as an older
block. The server refuses such a file. It is at most the last seconds of what nobody was promised
(``redis.appendfsync``), so that it is cut at its last whole command, and a copy of the rest kept.
Damage with whole commands behind it is none of a power cut, and nothing is changed then.
"""

import mmap
import os
import re
from pathlib import Path

DIRECTORY = "appendonlydir"
MANIFEST = "appendonly.aof.manifest"
REFUSALS = ("Bad file format", "Unexpected end of file")
"""Words of a server that does not read its append-only file."""
LARGEST_TAIL = 64 << 20
"""Bytes that a run may write between two syncs, one second apart: more than that is not young."""
LONGEST_COUNT = 32  # bytes of the line with a count, generously
COMMAND = re.compile(rb"\*[1-9]\d*\r\n\$\d+\r\n")
CLOSED = (b"exec", b"discard")


class Damaged(Exception):
    """The file cannot be mended. The message has the reason and what can be done."""


def cut_torn_tail(home: Path) -> str:
    """Cuts the newest file of the server in ``home``. Returns what was done; empty if it ends with
    a whole command. Raises Damaged, and then nothing is changed."""
    newest = _newest(home / DIRECTORY)
    size = newest.stat().st_size
    if not size:
        return ""
    with newest.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = whole_commands(data)
        if at == size:
            return ""
        follows = _whole_command_after(data, at)
        if follows or size - at > LARGEST_TAIL:
            why = "whole commands follow" if follows else f"{size - at:,} bytes follow"
            raise Damaged(
                f"{newest} is damaged at byte {at:,} of {size:,}, and {why}, which no power cut "
                f"leaves. Nothing was changed. Restore {newest.parent} from a copy; or begin a new "
                "run with the weights of the newest checkpoint (paceline up CONFIG --from "
                f"{home.parent} --run-dir OTHER); or give up what follows: truncate -s {at} "
                f"{newest}"
            )
        copy = newest.with_name(f"{newest.name}.cut-at-{at}")
        with copy.open("wb") as kept:
            kept.write(data[at:])
            kept.flush()
            os.fsync(kept.fileno())
    os.truncate(newest, at)
    return (
        "the end of Redis's append-only file was damaged, as a power cut leaves it: its last "
        f"{size - at:,} bytes were cut at the last whole command, and are kept in {copy}"
    )


def whole_commands(data: mmap.mmap | bytes) -> int:
    """Length in bytes of the whole commands that ``data`` begins with; those of a transaction
    count with its end."""
    at = whole = 0
    open_transaction = False
    while (end := _command_end(data, at)) is not None:
        name = _name(data, at)
        if name == b"multi":
            open_transaction = True
        elif name in CLOSED:
            open_transaction = False
        at = end
        if not open_transaction:
            whole = at
    return whole


def _command_end(data: mmap.mmap | bytes, at: int) -> int | None:
    if data[at : at + 1] == b"#":  # an annotation, such as a time
        end = data.find(b"\r\n", at, at + 1024)
        return None if end < 0 else end + 2
    found = _count(data, at, b"*")
    if found is None:
        return None
    words, at = found
    for _ in range(words):
        found = _count(data, at, b"$")
        if found is None:
            return None
        length, at = found
        at += length + 2
        if at > len(data) or data[at - 2 : at] != b"\r\n":
            return None
    return at


def _count(data: mmap.mmap | bytes, at: int, kind: bytes) -> tuple[int, int] | None:
    """A count behind ``kind``, and the place after its line."""
    end = data.find(b"\r\n", at, at + LONGEST_COUNT)
    digits = data[at + 1 : end]
    if end < 0 or data[at : at + 1] != kind or not digits.isdigit():
        return None
    return int(digits), end + 2


def _name(data: mmap.mmap | bytes, at: int) -> bytes:
    """The first word of a whole command in lower case; empty for an annotation."""
    found = _count(data, at, b"*")
    word = found and _count(data, found[1], b"$")
    return bytes(data[word[1] : word[1] + word[0]]).lower() if word else b""


def _whole_command_after(data: mmap.mmap | bytes, at: int) -> bool:
    """True if a whole command begins anywhere after ``at``, which is no command's end."""
    found = COMMAND.finditer(data, at + 1)
    return any(_command_end(data, command.start()) is not None for command in found)


def _newest(directory: Path) -> Path:
    """The file to which the server appends. Raises Damaged."""
    manifest = directory / MANIFEST
    try:
        lines = manifest.read_text(errors="replace").splitlines()
    except OSError as error:
        raise Damaged(f"{manifest} cannot be read: {error.strerror}") from None
    found = [words for line in lines if len(words := line.split()) >= 6 and words[5] == "i"]
    if not found:
        raise Damaged(f"{manifest} names no file to append to. Restore {directory} from a copy")
    newest = max(found, key=lambda words: int(words[3]) if words[3].isdigit() else 0)
    return directory / newest[1]
