"""Ends of processes are noticed before anybody reaps them."""

import subprocess
import sys

import psutil

from paceline.process.lifetime import alive, wait_ended


def test_a_process_that_nobody_reaps_has_ended_all_the_same() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        assert not wait_ended(process, 0.05) and alive(process)
        assert child.stdin is not None
        child.stdin.close()
        assert wait_ended(process, 30.0) and not alive(process)
        assert process.status() == psutil.STATUS_ZOMBIE, "there was nobody to wait for"
    assert wait_ended(process, 0.0)
