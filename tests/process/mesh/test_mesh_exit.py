"""A process ends with the status it wants, whatever its mesh is in the middle of."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, sys, threading, torch
from paceline.mesh.elastic_mesh import EpochCancelled, ProcessMesh
torch.set_num_threads(1)
url, rank, doing = sys.argv[1], int(sys.argv[2]), sys.argv[3]
size = 3 if doing == "forming" else 2
def form():
    return ProcessMesh.form(
        url=url, key=doing, rank=rank, size=size, device=torch.device("cpu"),
        cancelled=lambda: False)
if doing == "forming":
    def cancelled_at_exit():
        with contextlib.suppress(EpochCancelled):
            form()
    threading.Thread(target=cancelled_at_exit, daemon=True).start()
    threading.Event().wait(0.5)
else:
    mesh = form()
    if rank == 0:
        # The other member takes no part: this operation cannot end by itself.
        buffer = torch.ones(1000)
        mesh.recv_async(buffer, 1) if doing == "receiving" else mesh.all_reduce_async(buffer)
    threading.Event().wait(0.5)
print("end", flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize("doing", ["forming", "receiving", "reducing", "idle"])
def test_exit_while_the_mesh_is(url: str, doing: str) -> None:
    members = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url, str(rank), doing],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    for member in members:
        assert member.stdout is not None
        assert member.stdout.readline() == "end\n"
    for member in members:
        output, errors = member.communicate(timeout=60)
        assert (member.returncode, output) == (7, ""), errors
        assert "Traceback" not in errors


def test_exit_waits_for_threads_that_compute() -> None:
    program = """
import torch
from paceline.process import threads
torch.set_num_threads(1)
def work():
    threads.exiting.wait()
    for _ in range(20):
        torch.ones(300, 300) @ torch.ones(300, 300)
        threads.threading.Event().wait(0.01)
    print("finished", flush=True)
threads.start(work, "worker")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "finished\n"
