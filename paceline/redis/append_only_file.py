"""Append-only file of the embedded Redis after a power cut: its torn tail is cut.

What a file system had not written yet when the power went may come back as zeroes or as an older
block. The server refuses such a file. It is at most the last seconds of what nobody was promised
(``redis.appendfsync``), so that it is cut at its last whole command, and a copy of the rest kept.
Damage with whole commands behind it is none of a power cut, and nothing is changed then.
"""

import os
import re
import subprocess
from pathlib import Path

REFUSALS = ("Bad file format", "Unexpected end of file")
"""Words of a server that does not read its append-only file."""
LARGEST_TAIL = 64 << 20
"""Bytes that a run may write between two syncs, one second apart: more than that is not young."""
_CHECK = "redis-check-aof"
"""Name under which a server's binary, of Redis or of Valkey, checks a file."""
_COMMAND = re.compile(rb"\*[1-9]\d*\r\n\$\d+\r\n")
_BEGIN = b"*1\r\n$5\r\nMULTI\r\n"


class Damaged(Exception):
    """The file cannot be mended. The message has the reason and what can be done."""


def cut_torn_tail(home: Path, server: Path) -> str:
    """Cuts the newest file of the server in ``home``. Returns what was done; empty if it ends with
    a whole command. ``server``: a binary. Raises Damaged, and then nothing is changed."""
    newest = _newest(home / "appendonlydir")
    at, size = whole_commands(newest, server), newest.stat().st_size
    if at == size:
        return ""
    copy = newest.with_name(f"{newest.name}.cut-at-{at}")
    with newest.open("rb") as file:
        file.seek(at)
        rest = file.read(LARGEST_TAIL + 1)
    # A transaction without its end may begin with whole commands.
    begun = rest.removeprefix(_BEGIN)
    _write(copy, begun)
    follows = _COMMAND.search(begun, whole_commands(copy, server) + 1)
    if follows or len(rest) > LARGEST_TAIL:
        copy.unlink()
        why = "whole commands follow" if follows else f"{size - at:,} bytes follow"
        raise Damaged(
            f"{newest} is damaged at byte {at:,} of {size:,}, and {why}, which no power cut "
            f"leaves. Nothing was changed. Restore {newest.parent} from a copy; or begin a new run "
            f"with the weights of the newest checkpoint (paceline up CONFIG --from {home.parent} "
            f"--run-dir OTHER); or give up what follows: truncate -s {at} {newest}"
        )
    _write(copy, rest)
    os.truncate(newest, at)
    return (
        "the end of Redis's append-only file was damaged, as a power cut leaves it: its last "
        f"{size - at:,} bytes were cut at the last whole command, and are kept in {copy}"
    )


def whole_commands(file: Path, server: Path) -> int:
    """Length in bytes of the whole commands that ``file`` begins with; those of a transaction count
    with its end. Raises Damaged."""
    if not file.stat().st_size:
        return 0
    told = subprocess.run(
        [_CHECK, file], executable=server, capture_output=True, text=True, errors="replace"
    )
    if found := re.search(r"ok_up_to=(\d+)", told.stdout):
        return int(found[1])
    raise Damaged(f"{file} cannot be checked: {(told.stderr or told.stdout).strip()[-500:]}")


def _write(copy: Path, data: bytes) -> None:
    with copy.open("wb") as kept:
        kept.write(data)
        kept.flush()
        os.fsync(kept.fileno())


def _newest(directory: Path) -> Path:
    """The file to which the server appends. Raises Damaged."""
    found = [p for p in directory.glob("*.[0-9]*.incr.aof") if p.stat().st_size]
    numbers = {int(p.name.split(".")[-3]): p for p in found}
    if not numbers:
        raise Damaged(f"{directory} has no file to append to. Restore {directory} from a copy")
    return numbers[max(numbers)]
