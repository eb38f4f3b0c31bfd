"""A rank that is stopped is in the reports of rank 0, with its process id, until it is continued."""

from __future__ import annotations

import signal
import subprocess
import time

from paceline.process.kernel_state import kernel_state
from paceline.process.waits import WaitKind
from policy_worker.ranks.stuck_ranks import StuckRanks


def until(pid: int, stopped: bool) -> None:
    deadline = time.monotonic() + 60
    while (state := kernel_state(pid)) is None or state.stopped is not stopped:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stopped_rank_is_reported_until_it_is_continued() -> None:
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:
        ranks = StuckRanks([child.pid for child in children])
        assert ranks.waits(0.0) == []
        second = children[1]
        second.send_signal(signal.SIGSTOP)
        until(second.pid, stopped=True)
        assert ranks.waits(600.0) == [], "it has only just been seen"
        (found,) = ranks.waits(0.0)
        assert (found.kind, found.what, found.of) == (
            WaitKind.RANK,
            "rank 2, stopped",
            str(second.pid),
        )
        second.send_signal(signal.SIGCONT)
        until(second.pid, stopped=False)
        assert ranks.waits(0.0) == []
    finally:
        for child in children:
            child.kill()
            child.wait()
