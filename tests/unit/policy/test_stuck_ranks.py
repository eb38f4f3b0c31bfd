"""A rank that is stopped is in the reports of rank 0, with its process id, until it is
continued."""

import signal
import subprocess

from paceline.process.kernel_state import kernel_state
from paceline.process.waits import WaitKind
from policy_worker.control_plane import StuckRanks
from testbed.redis.external_redis import until


def stopped(pid: int) -> bool:
    state = kernel_state(pid)
    return state is not None and state.stopped


def test_a_stopped_rank_is_reported_until_it_is_continued() -> None:
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:
        ranks = StuckRanks([child.pid for child in children])
        # A process that is just starting may wait for the disk.
        until(lambda: ranks.waits(0.0) == [])
        second = children[1]
        second.send_signal(signal.SIGSTOP)
        until(lambda: stopped(second.pid))
        assert ranks.waits(600.0) == [], "it has only just been seen"
        (found,) = ranks.waits(0.0)
        assert (found.kind, found.what, found.of) == (
            WaitKind.RANK,
            "rank 2, stopped",
            str(second.pid),
        )
        second.send_signal(signal.SIGCONT)
        until(lambda: ranks.waits(0.0) == [])
    finally:
        for child in children:
            child.kill()
            child.wait()
