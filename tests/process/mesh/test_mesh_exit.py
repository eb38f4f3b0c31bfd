"""A process ends with the status it wants, whatever its mesh is in the middle of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.patience import patient

DOING = ("forming", "receiving", "reducing", "idle")
PROGRAM = """
import contextlib, json, os, signal, sys, threading, torch
from paceline.mesh.elastic_mesh import EpochCancelled, ProcessMesh
torch.set_num_threads(1)
url, folder, *all_doing = sys.argv[1:]

def member(doing, rank):
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
        global mesh
        mesh = form()
        if rank == 0:
            # The other member takes no part: this operation cannot end by itself.
            buffer = torch.ones(1000)
            mesh.recv_async(buffer, 1) if doing == "receiving" else mesh.all_reduce_async(buffer)
        threading.Event().wait(0.5)
    print("end", flush=True)
    sys.exit(7)

# Torch is imported once for all of them. A fork ends as a program does.
running = {}
for doing in all_doing:
    for rank in range(2):
        if pid := os.fork():
            running[pid] = f"{doing}-{rank}"
            continue
        for stream, kind in ((1, "out"), (2, "err")):
            file = os.open(f"{folder}/{doing}-{rank}.{kind}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, stream)
        signal.alarm(60)
        member(doing, rank)
ended = {}
while running:
    pid, status = os.wait()
    ended[running.pop(pid)] = os.waitstatus_to_exitcode(status)
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("printed")


@pytest.fixture(scope="module")
def ended(url: str, folder: Path) -> dict[str, int]:
    """Exit status of every member of every mesh."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, str(folder), *DOING],
        capture_output=True,
        text=True,
        timeout=patient(120),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    statuses: dict[str, int] = json.loads(done.stdout)
    return statuses


@pytest.mark.parametrize("doing", DOING)
def test_exit_while_the_mesh_is(ended: dict[str, int], folder: Path, doing: str) -> None:
    for rank in range(2):
        name = f"{doing}-{rank}"
        output, errors = ((folder / f"{name}.{kind}").read_text() for kind in ("out", "err"))
        assert (ended[name], output) == (7, "end\n"), errors
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
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
    )
    assert ended.stdout == "finished\n"
