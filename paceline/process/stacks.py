"""Python stacks of a process, also of one whose event loop or interpreter lock is stuck.

    paceline stacks ──SIGUSR2──► faulthandler, in C ──► <run dir>/stacks/<name>.<pid>.txt

The handler runs inside the signal, so it needs neither the event loop nor the interpreter lock.
Only a process that the kernel does not run (stopped, or in an uninterruptible wait) cannot answer.
"""

import contextlib
import faulthandler
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.process.kernel_state import kernel_state

ANSWER_S = 3.0
MOST_BYTES = 1 << 18
QUIET_S = 0.5  # a dump is complete once the file has not grown for so long
_SIGNAL = signal.SIGUSR2

_file: IO[bytes] | None = None  # kept open for the signal handler


@dataclass(frozen=True, slots=True)
class Stacks:
    text: str = ""  # Empty: the process did not answer
    note: str = ""  # reason why it did not answer


def stacks_file(run_dir: Path, name: str, pid: int) -> Path:
    return run_dir / "stacks" / f"{name}.{pid}.txt"


def install(run_dir: Path, name: str) -> None:
    """Has this process answer the signal from now on, if ``run_dir`` is writable."""
    global _file
    path = stacks_file(run_dir, name, os.getpid())
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        for earlier, pid in _files(path.parent, name).items():
            if kernel_state(pid, name) is None:
                with contextlib.suppress(OSError):  # one more file is no reason to have no stacks
                    earlier.unlink()
        opened = os.fdopen(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "ab", 0)
    except OSError:
        return
    faulthandler.register(_SIGNAL, opened, all_threads=True, chain=False)
    _file, before = opened, _file
    if before is not None:
        before.close()


def process_of(run_dir: Path, name: str) -> int | None:
    """Id of the living process of this machine that called ``install`` under ``name``."""
    pids = _files(run_dir / "stacks", name).values()
    return next((pid for pid in pids if kernel_state(pid, name) is not None), None)


def _files(directory: Path, name: str) -> dict[Path, int]:
    paths = {p: p.name[len(name) + 1 : -len(".txt")] for p in directory.glob(f"{name}.*.txt")}
    return {path: int(pid) for path, pid in paths.items() if pid.isdigit()}


def read_stacks(run_dir: Path, name: str, pid: int) -> Stacks:
    """Asks process ``pid`` of this machine, which called ``install`` under ``name``. Blocks for
    seconds."""
    seen = kernel_state(pid, name)
    path = stacks_file(run_dir, name, pid)
    if seen is not None and not (seen.stopped or seen.uninterruptible):
        # Without a handler the signal would end the process.
        if not path.exists() or not _catches(pid):
            return Stacks(note=f"process {pid} has not installed its handler: it is just starting")
        before = path.stat().st_size
        os.kill(pid, _SIGNAL)
        if text := _grown(path, before):
            return Stacks(text)
        seen = kernel_state(pid, name)
    if seen is None:
        return Stacks(note=f"there is no process {pid} of {name} on this machine")
    note = f"process {pid} cannot answer: the kernel says that it is {seen.words}"
    return Stacks(note=f"{note}. Continue it with: kill -CONT {pid}" if seen.stopped else note)


def _grown(path: Path, before: int) -> str:
    """The text written to ``path`` until it has not grown for QUIET_S, in ANSWER_S at most."""
    size, since = before, time.monotonic()
    deadline = since + ANSWER_S
    while time.monotonic() < deadline and (size == before or time.monotonic() - since < QUIET_S):
        time.sleep(0.02)
        if (now := path.stat().st_size) != size:
            size, since = now, time.monotonic()
    with path.open("rb") as file:
        file.seek(before)
        return file.read(MOST_BYTES).decode(errors="replace")


def _catches(pid: int) -> bool:
    try:
        mask = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    except (OSError, IndexError):
        return False
    return bool(int(mask, 16) >> (_SIGNAL - 1) & 1)
