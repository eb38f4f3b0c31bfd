"""``testbed.faults.chaos``: repeatable, and never a process that is not the run's own."""

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.observe.fleet_file import FleetRecord, ProcessId, ProcessRecord
from testbed.faults.fault_schedule import Fault, Mayhem, Target, plan, send, targets


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    code = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = [subprocess.Popen(code) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def record_of(run_dir: Path, **ids: ProcessId) -> None:
    record = FleetRecord("run", ProcessId(1, 0.0))
    for name, identity in ids.items():
        record.processes.append(ProcessRecord(name, "rollout", "log", ids=[identity]))
    record.write(run_dir)


def test_a_seed_gives_the_same_schedule_and_another_seed_another() -> None:
    assert plan(7, 10.0) == plan(7, 10.0)
    assert plan(7, 10.0) != plan(8, 10.0)
    assert plan(7, 10.0)[: len(plan(7, 1.0))] == plan(7, 1.0), "longer is the same, and more"
    faults = plan(7, 60.0)
    assert {f.role for f in faults} == {"controller", "policy", "rollout", "redis"}
    assert all(b.at_s - a.at_s >= 3.0 for a, b in itertools.pairwise(faults))
    assert any(f.stop_s for f in faults) and any(not f.stop_s for f in faults)
    assert any(f.everyone for f in faults)


def test_only_the_very_processes_of_the_record_are_touched(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    ours, reused = (ProcessId.of(p.pid) for p in sleepers)
    stale = ProcessId(reused.pid, reused.started - 100.0)
    record_of(tmp_path, ours=ours, stale=stale)
    assert targets(tmp_path, "rollout") == [Target("ours", ours)]
    assert not send(Target("stale", stale), signal.SIGKILL)
    assert sleepers[1].poll() is None
    assert targets(tmp_path, "policy") == targets(tmp_path / "nowhere", "policy") == []


def test_what_was_stopped_goes_on_even_when_chaos_is_cut_short(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    ours = ProcessId.of(sleepers[0].pid)
    record_of(tmp_path, ours=ours)
    process = psutil.Process(ours.pid)
    mayhem = Mayhem(tmp_path, lambda line: None)
    deadline = time.monotonic() + 1.0
    stopped = []

    def over() -> bool:
        stopped.append(process.status() == psutil.STATUS_STOPPED)
        return time.monotonic() > deadline

    mayhem.run([Fault(0.1, "rollout", 0.0, 60.0, False)], over)
    assert any(stopped)
    assert process.status() != psutil.STATUS_STOPPED
    assert [d["signal"] for d in mayhem.done] == ["SIGSTOP"]
