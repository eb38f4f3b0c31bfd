"""Diagnoses of real controllers: Redis, the leader, the data set and a killed worker are named."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from paceline.rpc.client import ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import (
    control_of,
    running_controllers,
    status,
    until,
    working_fleet,
)
from testbed.patience import patient
from tests.fixtures.rest import rest_url

ROOT = Path(__file__).resolve().parents[3]


async def why(controllers: Controllers, address: str) -> admin_pb2.WhyReply:
    control = control_of(controllers, [address])
    try:
        return await control.call("AdminService.Why", admin_pb2.WhyRequest(), 20.0)
    finally:
        await control.close()


async def until_named(
    controllers: Controllers,
    address: str,
    kind: str,
) -> admin_pb2.WhyReply:
    """The first answer that accuses a culprit of ``kind``."""
    last = admin_pb2.WhyReply()

    async def named() -> bool:
        nonlocal last
        try:
            last = await why(controllers, address)
        except ControlPlaneUnavailable:
            return False
        return last.culprit.kind == kind and last.severity == "stuck"

    try:
        await until(named, 120.0)
    except TimeoutError:
        raise AssertionError(f"the last answer was: {last}") from None
    assert last.sentence and last.next and last.remedy and last.since_s > 0
    return last


async def status_of(controllers: Controllers) -> admin_pb2.StatusReply:
    control = control_of(controllers)
    try:
        return await status(control)
    finally:
        await control.close()


async def leads(controllers: Controllers) -> bool:
    return bool((await status_of(controllers)).leader)


async def test_a_stopped_redis_and_then_a_stopped_leader_are_named(tmp_path: Path) -> None:
    """Redis by every controller, the leader by its standby before that takes over."""
    with running_controllers(tmp_path, 2, controller={"leader_lease_s": 20.0}) as controllers:
        await until(lambda: leads(controllers))
        async with working_fleet(controllers):
            os.kill(controllers.redis_pid, signal.SIGSTOP)
            try:
                for controller in controllers.started:
                    found = await until_named(controllers, controller.address, "redis")
                    assert "stopped" in found.because, found.sentence
                    assert f"kill -CONT {controllers.redis_pid}" in found.remedy
            finally:
                os.kill(controllers.redis_pid, signal.SIGCONT)
        leader = (await status_of(controllers)).leader
        first, standby = sorted(controllers.started, key=lambda c: c.id != leader)
        first.freeze()
        try:

            async def says_who_leads() -> bool:
                found = await why(controllers, standby.address)
                leads = f"is led by {first.id} (host" in found.because
                return leads and f"pid {first.pid}); {standby.id} stands by" in found.because

            await until(says_who_leads)
        finally:
            first.thaw()


@contextmanager
def blocked(directory: Path) -> Iterator[dict[str, str]]:
    """data.path of a file whose open() blocks, as on a dead mount: somebody else holds a lease on
    it. The kernel breaks the lease after /proc/sys/fs/lease-break-time, 45 s."""
    path = directory / "mount.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield {"path": str(path)}
    finally:
        os.close(file)
        signal.signal(signal.SIGIO, before)


async def test_a_data_set_on_a_dead_mount_is_named_by_controllers_that_cannot_lead(
    tmp_path: Path,
) -> None:
    with blocked(tmp_path) as data, running_controllers(tmp_path, 2, data=data) as controllers:
        path = data["path"]
        for controller in controllers.started:
            found = await until_named(controllers, controller.address, "dataset")
            assert found.culprit.name == path and not found.leads
        said = await asyncio.to_thread(paceline, "why", "--run-dir", str(controllers.run_dir))
        assert said.returncode == 1 and said.stdout.count(path) >= 2, said.stdout
        # It does not keep the process from ending.
        first = controllers.started[0].process
        first.terminate()
        assert await asyncio.to_thread(first.wait, 60) == 0


async def test_a_data_set_that_cannot_be_opened_ends_the_controller_with_its_name(
    tmp_path: Path,
) -> None:
    with (
        blocked(tmp_path) as data,
        running_controllers(tmp_path, 1, data={**data, "open_timeout_s": 1.0}) as controllers,
    ):
        process = controllers.started[0].process
        assert await asyncio.to_thread(process.wait, 60) == 2
        assert "mount.jsonl" in controllers.log() and "data.open_timeout_s" in controllers.log()


def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline_launcher", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=patient(120),
    )


async def test_a_launchers_word_is_told_over_grpc_and_rest_with_its_cause(tmp_path: Path) -> None:
    with running_controllers(tmp_path, 1) as controllers:
        where = controllers.started[0].address
        async with working_fleet(controllers, policies=1, rollouts=1) as (policies, _):
            worker = next(
                w
                for w in (await status(policies[0].control)).workers
                if w.worker_id.startswith("rollout")
            )
            report = admin_pb2.ExitReport(
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                exit_code=-9,
                cause="out_of_memory",
                detail="signal 9: killed by the kernel for lack of memory: cgroup /demo",
            )
            await policies[0].control.call("AdminService.ReportExit", report)
            redis = admin_pb2.FaultReport(
                request_id="r1", name="redis", pid=7, host="a", cause="stopped", detail="stopped"
            )
            for _ in range(2):  # a report that is repeated counts once
                await policies[0].control.call("AdminService.ReportFault", redis)
            wrong = admin_pb2.FaultReport(request_id="r2", name="redis", cause="tea")
            with pytest.raises(RequestRefused, match="one of killed, out_of_memory"):
                await policies[0].control.call("AdminService.ReportFault", wrong)
            told = (await why(controllers, where)).faults
            assert told.startswith(
                "2 faults so far, 2 with a known cause (out of memory 1, stopped 1)"
            )
            async with httpx.AsyncClient(base_url=rest_url(controllers), timeout=30) as client:
                found = (await client.get("/api/v1/faults")).json()
                events = (await client.get("/api/v1/events")).json()["events"]
            assert [(f["name"], f["cause"]) for f in found["recent"]] == [
                (worker.worker_id, "out_of_memory"),
                ("redis", "stopped"),
            ]
            assert found["sentence"].startswith(told[:70]) and found["attributed_share"] == 1.0
            (died,) = [e for e in events if e["type"] == "WorkerDied"]
            assert died["fields"]["cause"] == "out_of_memory" and "lack of memory" in died["text"]
