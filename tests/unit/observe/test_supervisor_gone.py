"""A fleet whose supervisor was killed: nobody restarts its processes, and status says so."""

import os
from pathlib import Path

from paceline.observe.fleet_file import (
    FleetRecord,
    ProcessId,
    ProcessRecord,
    supervisor_gone,
)

HERE = ProcessId.of(os.getpid())
GONE = ProcessId(1, 0.0)


def record(run_dir: Path, supervisor: ProcessId, worker: ProcessId) -> None:
    fleet = FleetRecord("demo", supervisor)
    fleet.processes.append(ProcessRecord("policy-0", "policy", "log", ids=[worker]))
    fleet.write(run_dir)


def test_a_fleet_without_its_supervisor_names_the_command_that_takes_it_over(
    tmp_path: Path,
) -> None:
    assert supervisor_gone(tmp_path) == "", "started by hand"
    for supervisor, worker in ((HERE, HERE), (GONE, GONE)):
        record(tmp_path, supervisor, worker)
        assert supervisor_gone(tmp_path) == "", "supervised, or ended"
    record(tmp_path, GONE, HERE)
    said = supervisor_gone(tmp_path)
    assert "nobody restarts" in said
    assert f"paceline up {tmp_path / 'config.toml'} --run-dir {tmp_path} --attach" in said
