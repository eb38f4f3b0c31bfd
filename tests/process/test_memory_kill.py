"""Real processes that are killed: by the kernel in a control group with a limit (needs root), or by a stranger."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.supervisor.child import Child, ChildSpec
from paceline.supervisor.evidence import Witness
from testbed.fleets.controllers import until

LIMIT_MB = 64
HUNGRY = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
held = []
while True:
    held.append(b"x" * (1 << 20))
"""
MOUNTS = (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"))


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of its own with a limit of memory."""
    for mount, limit in MOUNTS:
        path = Path(mount) / f"paceline-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            if not (path / limit).exists():
                continue
            (path / limit).write_text(str(LIMIT_MB << 20))
            yield path
            return
        except OSError:
            continue
        finally:
            _remove(path)
    pytest.skip("no control group with a limit of memory can be made here: needs root")


def _remove(path: Path) -> None:
    deadline = time.monotonic() + 10.0
    while True:
        try:
            path.rmdir()
            return
        except OSError:
            # The kernel still takes the dead process out of it.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


async def test_a_child_that_the_kernel_kills_for_memory_is_said_to_be(
    group: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    argv = (sys.executable, "-c", HUNGRY, str(group / "cgroup.procs"), str(go))
    child = await Child.start(ChildSpec("hungry", "rollout", argv, os.environ, tmp_path / "log"))
    witness = Witness(child.pid)
    await until(lambda: str(child.pid) in (group / "cgroup.procs").read_text().split())
    assert witness.look() is None
    go.touch()
    assert await child.wait() == -signal.SIGKILL
    found = witness.verdict(-signal.SIGKILL)
    assert found.cause == "out_of_memory"
    assert f"cgroup /{group.name}, limit {LIMIT_MB} MiB" in found.detail, found.detail


async def test_a_child_that_a_stranger_kills_is_not_said_to_lack_memory(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", "import time; time.sleep(600)")
    child = await Child.start(ChildSpec("idle", "rollout", argv, os.environ, tmp_path / "log"))
    witness = Witness(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    assert witness.verdict(-signal.SIGKILL).cause == "killed"
