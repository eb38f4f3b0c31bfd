"""End of an embedded Redis whose exit status nobody has: its own log tells a shutdown and a crash
from a SIGKILL.

A controller may have started the server and ended before it. The status is lost with its parent
then.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from controller.ledger.enums import FaultCause
from paceline_launcher.launch.evidence import Finding

READ_BYTES = 1 << 18
"""Of the end of the log; a crash report has some 10 KiB."""
CRASH = re.compile(r"crashed by signal: (\d+)")
FAILURE = re.compile(r"(ASSERTION FAILED|Guru Meditation|OUT OF MEMORY|\S[^\n]*Exiting\.\.\.)")
SHUTDOWN = re.compile(r"Received (SIG\w+) scheduling shutdown|User requested shutdown|bye bye")


def end_in_log(log: Path, pid: int) -> Finding | None:
    """What ``log`` says of the end of server ``pid``; None if it has no start of that server."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - READ_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    # An earlier server may have had the same number.
    _, started, since = text.rpartition(f"pid={pid}, just started")
    own = [line for line in since.splitlines() if line.startswith(f"{pid}:")]
    if not started and not own:
        return None
    said = "\n".join(own)
    if crash := CRASH.search(said):
        return Finding(FaultCause.CRASHED, f"signal {crash[1]}, says its log {log}")
    if failure := FAILURE.search(said):
        words = failure[1].partition(" # ")[2] or failure[1]
        return Finding(FaultCause.ERROR, f"{words}, says its log {log}")
    if shutdown := SHUTDOWN.search(said):
        return Finding(FaultCause.KILLED, f"{shutdown[1] or 'a shutdown'}, says its log {log}")
    return Finding(FaultCause.KILLED, f"signal 9: its log {log} ends without a shutdown or a crash")
