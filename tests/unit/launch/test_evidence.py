"""Causes of the end of a process, from control groups and logs that are handed in."""

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from paceline.observe.vocabulary import FaultCause
from paceline.process.kernel_state import KernelState
from paceline.process.lifetime import alive, wait_ended
from paceline.process.memory_kills import (
    MemoryKills,
    count_again,
    memory_kills,
)
from paceline_launcher.launch.child import UNSEEN
from paceline_launcher.launch.fault_reports import BEFORE_S, Witness

PID = 812


@dataclass
class Machine:
    """Stands in for a kernel."""

    kills: int = 3
    now: float = 100.0
    letter: str = "R"
    group: str = "/demo"

    def counted(self, *_: object) -> MemoryKills:
        return MemoryKills(self.group, self.kills, 512 << 20)

    def witness(self) -> Witness:
        return Witness(
            PID,
            self.counted,
            self.counted,
            lambda pid: KernelState(self.letter),
            lambda: self.now,
            lambda pid: self.group,
        )


def test_a_kill_that_the_group_has_counted_is_one_for_lack_of_memory() -> None:
    machine = Machine()
    witness = machine.witness()
    machine.kills += 1
    found = witness.verdict(-signal.SIGKILL)
    assert found.cause == "out_of_memory"
    for word in ("signal 9", "cgroup /demo, limit 512 MiB", "give it more memory"):
        assert word in found.detail


def test_a_kill_of_another_process_some_time_before_is_not_its_own() -> None:
    machine = Machine()
    witness = machine.witness()
    machine.kills += 1
    for _ in range(10):
        machine.now += BEFORE_S / 4
        assert witness.look() is None
    assert witness.verdict(-signal.SIGKILL).cause == "killed"


def test_a_kill_in_a_group_that_it_has_just_been_moved_to_counts() -> None:
    machine = Machine()
    witness = machine.witness()
    machine.group, machine.kills = "/small", 0
    assert witness.look() is None
    machine.kills = 1
    assert witness.verdict(-signal.SIGKILL).cause == "out_of_memory"


def test_a_replica_that_ends_because_one_of_its_ranks_was_killed_says_so() -> None:
    machine = Machine()
    witness = machine.witness()
    machine.kills += 1
    machine.now += 1.0
    witness.look()
    machine.now += 1.0
    assert witness.verdict(1).cause == "out_of_memory"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (-signal.SIGKILL, "killed"),
        (-signal.SIGTERM, "killed"),
        (-signal.SIGSEGV, "crashed"),
        (3, "error"),
        (0, "asked_to_leave"),
        (UNSEEN, "unattributed"),
    ],
)
def test_an_exit_status_alone_tells_as_much(code: int, cause: str) -> None:
    found = Machine().witness().verdict(code)
    assert found.cause == cause and FaultCause(found.cause)


def test_what_its_own_launcher_killed_is_no_fault() -> None:
    machine = Machine()
    witness = machine.witness()
    assert witness.verdict(-signal.SIGKILL, ours=True).cause == "asked_to_leave"


def test_a_stopped_process_is_told_once_for_each_stop() -> None:
    machine = Machine()
    witness = machine.witness()

    def looks(letters: str) -> list[str]:
        told = []
        for machine.letter in letters:
            if found := witness.look():
                told.append(found.cause)
        return told

    assert looks("RTR") == [], "a debugger stops it for a moment"
    assert looks("TTTT") == ["stopped"]
    assert looks("RTT") == ["stopped"]


# ---- the kernel's files ---------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_group_of_version_2_is_read_also_after_its_process_has_ended(tmp_path: Path) -> None:
    write(tmp_path / "proc/7/cgroup", "0::/jobs/demo\n")
    group = tmp_path / "sys/fs/cgroup/jobs/demo"
    write(group / "memory.events", "low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n")
    write(group / "memory.max", f"{256 << 20}\n")
    found = memory_kills(7, tmp_path)
    assert found == MemoryKills("/jobs/demo", 2, 256 << 20)
    assert found.words == "cgroup /jobs/demo, limit 256 MiB"
    write(group / "memory.events", "oom_kill 3\n")
    assert count_again(found, tmp_path).kills == 3, "its process has ended"


def test_a_group_of_version_1_is_read_beside_version_2(tmp_path: Path) -> None:
    write(tmp_path / "proc/7/cgroup", "5:cpu:/\n4:memory:/demo\n0::/\n")
    group = tmp_path / "sys/fs/cgroup/memory/demo"
    write(group / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    write(group / "memory.limit_in_bytes", f"{128 << 20}\n")
    assert memory_kills(7, tmp_path) == MemoryKills("/demo", 1, 128 << 20)


def test_a_container_sees_its_own_group_at_the_mount_whatever_its_path(tmp_path: Path) -> None:
    write(tmp_path / "proc/7/cgroup", "0::/kubepods/pod1/c1\n")
    write(tmp_path / "sys/fs/cgroup/memory.events", "oom_kill 0\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", "max\n")
    found = memory_kills(7, tmp_path)
    assert found == MemoryKills("/", 0)
    write(tmp_path / "sys/fs/cgroup/memory.max", "9223372036854771712\n")
    assert memory_kills(7, tmp_path) == found


def test_a_machine_without_control_groups_tells_nothing(tmp_path: Path) -> None:
    assert memory_kills(7, tmp_path) is None
    write(tmp_path / "proc/7/cgroup", "0::/demo\n")
    assert memory_kills(7, tmp_path) is None


def test_a_process_that_nobody_reaps_has_ended_all_the_same() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        assert not wait_ended(process, 0.05) and alive(process)
        assert child.stdin is not None
        child.stdin.close()
        assert wait_ended(process, 30.0) and not alive(process)
        assert process.status() == psutil.STATUS_ZOMBIE, "there was nobody to wait for"
    assert wait_ended(process, 0.0)
