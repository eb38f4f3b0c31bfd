"""The end of the Redis that a launcher has started: its cause is known whatever else is started at
that moment."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.config.sections.services import RedisConfig
from paceline.observe.fleet_file import ProcessId
from paceline.redis.server import ensure_redis, stop_redis
from paceline_launcher.launch.child import until_gone
from paceline_launcher.launch.fault_reports import FaultReports
from testbed.fleets.controllers import until
from tests.fakes.admin_control import AdminControl


async def fault_of(identity: ProcessId) -> Any:
    """What the controllers are told of the end of that Redis."""
    control: Any = AdminControl(ReportFault=None)
    reports = FaultReports(control)
    await reports.await_redis(identity)
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
    fault = await fault_of(identity)
    assert (fault.name, fault.pid, fault.cause) == ("redis", identity.pid, "killed")


async def test_a_redis_that_was_killed_is_said_to_be_though_its_successor_runs_already(
    tmp_path: Path,
) -> None:
    """On a busy machine the launcher starts the next one before it has looked at what the first has
    ended of."""
    identity = await killed(tmp_path)
    try:
        assert ensure_redis(tmp_path, RedisConfig()).started
        fault = await fault_of(identity)
        assert (fault.name, fault.pid, fault.cause) == ("redis", identity.pid, "killed")
    finally:
        stop_redis(tmp_path)
