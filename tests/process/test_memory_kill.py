"""Real processes that are killed: by the kernel in a control group with a limit (needs root), or by
a stranger."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_launcher.launch.child import Child, ChildSpec
from paceline_launcher.launch.fault_reports import Witness
from testbed.faults.memory_group import LIMIT_MB, members, memory_group, name_of
from testbed.fleets.controllers import until

HUNGRY = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
held = []
while True:
    held.append(b"x" * (1 << 20))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of its own with a limit of memory."""
    with memory_group(name_of("test")) as path:
        if path is None:
            pytest.skip("no control group with a limit of memory can be made here: needs root")
        yield path


async def test_a_child_that_the_kernel_kills_for_memory_is_said_to_be(
    group: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    argv = (sys.executable, "-c", HUNGRY, str(group / "cgroup.procs"), str(go))
    child = await Child.start(ChildSpec("hungry", "rollout", argv, os.environ, tmp_path / "log"))
    witness = Witness(child.pid)
    await until(lambda: child.pid in members(group))
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
