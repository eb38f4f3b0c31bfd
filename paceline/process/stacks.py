"""Python stacks of a process, also of one whose event loop or interpreter lock is stuck.

    paceline stacks ──SIGUSR2──► faulthandler, in C ──► standard error, which is its log

The handler runs inside the signal, so it needs neither the event loop nor the interpreter lock.
Only a process that the kernel does not run (stopped, or in an uninterruptible wait) cannot answer.
"""

import faulthandler
import os
import signal
import time
from pathlib import Path

from paceline.process.kernel_state import kernel_state

ANSWER_S = 3.0
MOST_BYTES = 1 << 18
QUIET_S = 0.5  # a dump is complete once the log has not grown for so long
_SIGNAL = signal.SIGUSR2


def install() -> None:
    """Has this process answer the signal from now on."""
    faulthandler.register(_SIGNAL, all_threads=True, chain=False)


def read_stacks(pid: int, log: Path) -> tuple[str, str]:
    """Stacks of process ``pid`` of this machine, which writes to ``log``, or else the reason why it
    does not answer. Blocks for seconds."""
    seen = kernel_state(pid)
    if seen is not None and not (seen.stopped or seen.uninterruptible):
        # Without a handler the signal would end the process.
        if not _catches(pid):
            return "", f"process {pid} has not installed its handler: it is just starting"
        before = log.stat().st_size
        os.kill(pid, _SIGNAL)
        if text := _grown(log, before):
            return text, ""
        seen = kernel_state(pid)
    if seen is None:
        return "", f"process {pid} has ended"
    note = f"process {pid} cannot answer: the kernel says that it is {seen.words}"
    return "", f"{note}. Continue it with: kill -CONT {pid}" if seen.stopped else note


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
