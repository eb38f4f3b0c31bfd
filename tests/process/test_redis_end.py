"""The end of the Redis that a launcher has started: its cause is known whatever else is started at
that moment."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config.sections.services import RedisConfig
from paceline.observe.fleet_file import ProcessId
from paceline.redis.server import ensure_redis, redis_log, stop_redis
from paceline_launcher.launch.child import until_gone
from paceline_launcher.launch.fault_reports import FaultReports, end_in_log
from testbed.fleets.controllers import until
from testbed.patience import patient
from tests.fakes.admin_control import AdminControl


async def fault_of(identity: ProcessId, run_dir: Path) -> Any:
    """What the controllers are told of the end of that Redis."""
    control: Any = AdminControl(ReportFault=None)
    reports = FaultReports(control)
    await reports.await_redis(identity, redis_log(run_dir))
    await until(lambda: control.heard)
    await reports.settle(60.0)
    return control.heard[0][1]


async def killed(run_dir: Path) -> ProcessId:
    """A server that this process has started, and that was killed."""
    identity = ProcessId.of(ensure_redis(run_dir, RedisConfig()).pid or 0)
    os.kill(identity.pid, signal.SIGKILL)
    await until_gone(identity)
    return identity


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a recorded warning would hold the child
async def test_a_redis_that_was_killed_is_said_to_be_though_another_process_starts(
    tmp_path: Path,
) -> None:
    identity = await killed(tmp_path)
    other = await asyncio.create_subprocess_exec("true")  # it reaps children that nobody holds
    assert await other.wait() == 0
    fault = await fault_of(identity, tmp_path)
    assert (fault.name, fault.pid, fault.cause) == ("redis", identity.pid, "killed")


async def test_a_redis_that_was_killed_is_said_to_be_though_its_successor_runs_already(
    tmp_path: Path,
) -> None:
    """On a busy machine the launcher starts the next one before it has looked at what the first has
    ended of."""
    identity = await killed(tmp_path)
    try:
        assert ensure_redis(tmp_path, RedisConfig()).started
        fault = await fault_of(identity, tmp_path)
        assert (fault.name, fault.pid, fault.cause) == ("redis", identity.pid, "killed")
    finally:
        stop_redis(tmp_path)


START = """\
import sys
from pathlib import Path
from paceline.config.sections.services import RedisConfig
from paceline.redis.server import ensure_redis
print(ensure_redis(Path(sys.argv[1]), RedisConfig()).pid)
"""


def started_by_another(run_dir: Path) -> ProcessId:
    """A server whose parent has ended."""
    start = [sys.executable, "-c", START, str(run_dir)]
    done = subprocess.run(start, check=True, capture_output=True, timeout=patient(60))
    return ProcessId.of(int(done.stdout))


@pytest.mark.parametrize(
    ("number", "cause", "words"),
    [
        (signal.SIGKILL, "killed", "signal 9: its log"),
        (signal.SIGTERM, "killed", "Received SIGTERM"),
        (signal.SIGSEGV, "crashed", "crashed by signal: 11"),
    ],
)
async def test_a_redis_whose_controller_has_ended_before_it_has_a_cause(
    tmp_path: Path, number: signal.Signals, cause: str, words: str
) -> None:
    """A controller had started it; no process of this run can ask for its exit status."""
    identity = await asyncio.to_thread(started_by_another, tmp_path)
    os.kill(identity.pid, number)
    fault = await fault_of(identity, tmp_path)
    assert (fault.pid, fault.cause) == (identity.pid, cause)
    assert words in fault.detail


@pytest.mark.parametrize(
    ("line", "cause", "words"),
    [
        (
            "# Can't recover from AOF write error, always fsync. Exiting...",
            "error",
            "Can't recover",
        ),
        ("# === ASSERTION FAILED ===", "error", "ASSERTION FAILED"),
        ("* Ready to accept connections tcp", "killed", "signal 9"),
    ],
)
def test_a_redis_that_gave_up_says_so_in_its_log(
    tmp_path: Path, line: str, cause: str, words: str
) -> None:
    log = tmp_path / "redis.log"
    when = "25 Nov 2026 18:50:27.843"
    start = f"7:M {when} * Valkey version=9.1.2, pid=7, just started\n"
    earlier = f"{start}7:M {when} # Received SIGTERM scheduling shutdown...\n"
    log.write_text(f"{earlier}{start}7:M {when} {line}\n8:M {when} # Exiting...\n")
    found = end_in_log(log, 7)
    assert found is not None and (found.cause, words in found.detail) == (cause, True)
    assert end_in_log(log, 9) is None and end_in_log(tmp_path / "none", 7) is None
