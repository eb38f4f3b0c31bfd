"""The Ray provider on real Ray, with placement groups and detached actors; and a rendered job that
`ray job submit` runs, also past the loss of the head. One cluster on this machine serves all."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from paceline.config.load import load_config
from paceline.providers.base import Trouble
from paceline.providers.ray import RayProvider, give_back_places
from paceline.rpc.addresses import free_ports
from paceline.v1 import admin_pb2, common_pb2
from testbed.fleets.controllers import until
from testbed.fleets.local_run import ROOT, SLOWLY, Commands, write_run
from testbed.patience import patient
from tests.fixtures.ray_head import RayHead
from tests.fixtures.rendered import base_environment, render

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(one) for one in ("ray", "aiohttp_cors", "opencensus")),
        reason="Ray is not installed, or not its job server: pip install 'paceline[ray]'",
    ),
]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """It has four CPUs, and ends with all that it started."""
    made = RayHead(tmp_path_factory.mktemp("ray", numbered=False))
    # Once a user of this machine has a token of Ray, it asks for it, also the tests.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    try:
        made.start()
        yield made
    finally:
        made.close()


@asynccontextmanager
async def placing(
    tmp_path: Path, address: str, name: str
) -> AsyncIterator[tuple[RayProvider, list[str]]]:
    """A provider whose worker command is a program that waits to be ended; and who was drained."""
    module = tmp_path / "rollout_worker.py"
    module.write_text("import time, sys\nprint('up', sys.argv[1:], flush=True)\ntime.sleep(600)\n")
    config = load_config(
        write_run(tmp_path, run={"name": name}), ["fleet.provider=ray", f"ray.address={address}"]
    )
    drained: list[str] = []

    async def drain(worker: admin_pb2.WorkerStatus) -> None:
        drained.append(worker.worker_id)

    provider = RayProvider(config, str(tmp_path / "run"), drain)
    order = provider._order

    def elsewhere(role: str, name: str, status: admin_pb2.StatusReply) -> dict:
        return {
            **order(role, name, status),
            "module": "stand_in",
            "environment": {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"},
        }

    module.rename(tmp_path / "stand_in.py")
    provider._order = elsewhere  # type: ignore[method-assign]
    try:
        yield provider, drained
        assert await give_back_places(config) == ""
    finally:
        await provider.close()


def wanted(*workers: tuple[str, str, int], **desired: int) -> admin_pb2.StatusReply:
    status = admin_pb2.StatusReply(phase="running", desired=desired)
    for name, state, pid in workers:
        status.workers.add(
            worker_id=name, role=common_pb2.ROLE_ROLLOUT, state=state, pid=pid, incarnation=1
        )
    return status


async def placed(provider: RayProvider, count: int) -> dict[str, int]:
    """Pids of the running workers once there are ``count``."""
    for _ in range(120):
        found = (await provider._ask(op="list"))["placed"]
        running = {p["name"]: p["pid"] for p in found if p["state"] == "running"}
        if len(running) == count and len(found) == count:
            return running
        await asyncio.sleep(0.5)
    raise AssertionError(f"never {count} running: {found}")


async def first_answer(provider: RayProvider, status: admin_pb2.StatusReply) -> str:
    """The cluster may still be starting: as in a real run, trouble is tried again."""
    for _ in range(60):
        try:
            return await provider.converge(status)
        except Trouble as why:
            trouble = why
            await asyncio.sleep(1.0)
    raise trouble


async def test_workers_are_placed_replaced_found_again_and_let_go(
    head: RayHead, tmp_path: Path
) -> None:
    async with placing(tmp_path, head.address, "placing") as (provider, drained):
        await first_answer(provider, wanted(rollout=2))
        pids = await placed(provider, 2)
        assert set(pids) == {"rollout-0", "rollout-1"}
        log = tmp_path / "run" / "logs" / "rollout-1.log"
        await until(lambda: "'--id', 'rollout-1'" in log.read_text())

        # A leader's failover: another driver finds what is there and starts nothing.
        await provider.close()
        await provider.converge(wanted(rollout=2))
        assert await placed(provider, 2) == pids

        # A worker that dies is started anew, and only that one.
        os.kill(pids["rollout-0"], signal.SIGKILL)
        begun = time.monotonic()
        while (now := await _pids(provider)).get("rollout-0") in (None, pids["rollout-0"]):
            assert time.monotonic() - begun < 60
            await provider.converge(wanted(rollout=2))
            await asyncio.sleep(0.2)
        assert now["rollout-1"] == pids["rollout-1"]

        # One fewer: the youngest is asked to leave, and not before it has left is it gone.
        here = [(name, "running", pid) for name, pid in now.items()]
        await provider.converge(wanted(*here, rollout=1))
        assert drained == ["rollout-1"]
        assert psutil.pid_exists(now["rollout-1"])
        leaving = [
            ("rollout-0", "running", now["rollout-0"]),
            ("rollout-1", "draining", now["rollout-1"]),
        ]
        await provider.converge(wanted(*leaving, rollout=1))
        os.kill(now["rollout-1"], signal.SIGTERM)  # as if it had finished
        await until(lambda: not _alive(now["rollout-1"]))
        await provider.converge(wanted(*leaving, rollout=1))
        assert await placed(provider, 1) == {"rollout-0": now["rollout-0"]}


async def test_what_the_cluster_has_no_room_for_is_said_and_taken_back(
    head: RayHead, tmp_path: Path
) -> None:
    async with placing(tmp_path, head.address, "crowded") as (provider, _):
        await first_answer(provider, wanted(rollout=5))
        async with asyncio.timeout(60.0):
            # Ray tells nobody that it has placed one.
            while len(await _pids(provider)) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        said = await provider.converge(wanted(rollout=5))
        assert "waiting for cluster resources" in said
        assert await provider.converge(wanted(rollout=4)) is not None
        await placed(provider, 4)


async def test_a_worker_is_left_in_peace_by_a_silent_actor_and_ends_with_a_dead_one(
    head: RayHead, tmp_path: Path
) -> None:
    async with placing(tmp_path, head.address, "silent") as (provider, drained):
        await first_answer(provider, wanted(rollout=1))
        pid = (await placed(provider, 1))["rollout-0"]
        actor = psutil.Process(pid).parent()
        assert actor is not None
        actor.suspend()
        try:
            # Whether it is to stay, to leave, or leaves already.
            for state, desired in (("running", 1), ("running", 0), ("draining", 0)):
                here = ("rollout-0", state, pid)
                assert await provider.converge(wanted(here, rollout=desired)) == ""
                assert _alive(pid)
        finally:
            actor.resume()
        assert drained == []
        await provider.converge(wanted(("rollout-0", "running", pid), rollout=0))
        assert drained == ["rollout-0"]
        assert await placed(provider, 1) == {"rollout-0": pid}
        # An actor that ends takes its worker with it.
        actor.kill()
        await until(lambda: not _alive(pid))
        await provider.converge(wanted(rollout=1))
        assert (await placed(provider, 1))["rollout-0"] != pid


async def _pids(provider: RayProvider) -> dict[str, int]:
    found = (await provider._ask(op="list"))["placed"]
    return {p["name"]: p["pid"] for p in found if p["state"] == "running"}


def _alive(pid: int) -> bool:
    """A process whose actor has not looked at its end yet is no longer alive."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def submitted(where: Path, head: RayHead, steps: int) -> Commands:
    """``submit.sh`` of a run in ``where/run``."""
    job = Commands(where / "run")
    config = write_run(
        where,
        run={"name": f"job-{os.getpid()}"},
        reward=SLOWLY,
        train={"steps": steps, "checkpoint_every": 5, "eval_every": 100},
        fleet={"controllers": 1, "policy": 1, "rollout": 1},
    )
    controller, rest = free_ports("", 2)
    options = ("--set", f"controller.port={controller}", "--set", f"rest.port={rest}")
    folder = where / "job"
    folder.mkdir()
    for name, text in render(config, "ray", "--run-dir", str(job.run_dir), *options).items():
        (folder / name).write_text(text)
    environment = {**base_environment(where), "RAY_API_SERVER_ADDRESS": head.job_server}
    job.launch("submit", ["bash", str(folder / "submit.sh")], {**os.environ, **environment})
    return job


@pytest.mark.e2e
def test_a_job_trains_to_its_end_although_the_head_is_lost(head: RayHead, tmp_path: Path) -> None:
    """The last one: its head has lost all that was placed."""
    job = submitted(tmp_path, head, steps=16)
    try:
        job.steps(3)
        head.lose()
        head.start()
        assert job.ended("submit", 300.0) == 0, job.said()
        job.assert_sound(steps=16)
        assert "it is submitted again" in job.output_of("submit").read_text()
        assert places_left(head, tmp_path) == [], "resources of the run are given back"
    finally:
        job.close()


def places_left(head: RayHead, where: Path) -> list[str]:
    """States of placement groups that still hold resources, from Ray's own command."""
    code = (
        "import json, ray; ray.init(address='auto', log_to_driver=False, logging_level='ERROR')\n"
        "from ray.util import placement_group_table\n"
        "print(json.dumps([g['state'] for g in placement_group_table().values()]))\n"
    )
    environment = {**os.environ, **base_environment(where), "RAY_ADDRESS": head.address}
    done = subprocess.run(
        ["python", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert done.returncode == 0, done.stderr
    return [state for state in json.loads(done.stdout.splitlines()[-1]) if state != "REMOVED"]
