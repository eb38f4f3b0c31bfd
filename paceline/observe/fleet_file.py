"""``fleet.json``: the processes that a supervisor started. The operating system reuses process ids,
so each is recorded with its start time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from paceline.process.files import read_ours, replace_file
from paceline.process.lifetime import started_s

FILE = "fleet.json"


@dataclass(frozen=True, slots=True)
class ProcessId:
    pid: int
    started: float  # Seconds since boot

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Raises psutil.NoSuchProcess if it is gone."""
        return cls(pid, started_s(pid))

    def alive(self) -> bool:
        """Return True if this process runs, not another one with its id. Zombies are dead. One that
        cannot be looked at now, for lack of descriptors, is taken to run: it is looked at again."""
        try:
            same = started_s(self.pid) == self.started
            return same and bool(psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False
        except OSError:
            return True


@dataclass(slots=True)
class ProcessRecord:
    name: str
    role: str
    log: str
    address: str = ""  # gRPC address of a controller
    state: str = "new"  # new, running, waiting (for its restart), or ended
    restarts: int = 0
    exit_code: int | None = None
    ids: list[ProcessId] = field(default_factory=list)
    """Every process started under this name, newest last."""


@dataclass(slots=True)
class FleetRecord:
    run: str
    supervisor: ProcessId
    processes: list[ProcessRecord] = field(default_factory=list)
    redis: list[ProcessId] = field(default_factory=list)

    def write(self, run_dir: Path) -> None:
        """Replaces ``fleet.json`` atomically."""
        replace_file(run_dir / FILE, _FILE.dump_json(self, indent=1) + b"\n")

    @classmethod
    def read(cls, run_dir: Path) -> FleetRecord | None:
        """The record in ``run_dir``; None if there is none or it cannot be read. Raises NotOurs:
        processes that it names are sent signals."""
        try:
            return _FILE.validate_json(read_ours(run_dir / FILE))
        except (OSError, ValueError):
            return None

    def survivors(self) -> list[ProcessId]:
        """Processes of roles (not Redis) that still run."""
        return [i for process in self.processes for i in process.ids if i.alive()]


def supervisor_gone(run_dir: Path) -> str:
    """Remedy for a fleet that runs without its ``paceline up``; empty if none does."""
    record = FleetRecord.read(run_dir)
    if record is None or record.supervisor.alive() or not record.survivors():
        return ""
    command = f"paceline up {run_dir / 'config.toml'} --run-dir {run_dir} --attach"
    return (
        f"`paceline up` (pid {record.supervisor.pid}) has ended, so nobody restarts a process that "
        f"dies. Take the fleet over: {command}"
    )


_FILE = TypeAdapter(FleetRecord)
