"""An external Redis server that is killed, one that comes back without the end of its file, and a
master behind Sentinels that is replaced."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from paceline.rpc.addresses import free_ports
from paceline.rpc.client import ControlPlane
from paceline.v1 import policy_pb2
from testbed.fleets.controllers import (
    addresses,
    assert_sound,
    config_of,
    control_of,
    running_controllers,
    status,
    until,
    working_fleet,
)
from testbed.redis.external_redis import Sentinels, Server
from testbed.redis.external_redis import until as redis_until
from testbed.tiny_model import make_tiny_model
from tests.fixtures import policy_process


async def test_an_external_redis_killed_and_started_again_loses_nothing(tmp_path: Path) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    server = Server(tmp_path, "own", port, "appendonly yes", 'save ""')
    url = server.url
    try:
        with running_controllers(tmp_path, 2, redis={"url": url}) as controllers:
            async with working_fleet(controllers) as (policies, rollouts):
                await until(lambda: policies[0].timings.steps >= 3)
                server.kill()
                await until(lambda: _waits_for_redis(policies[0].control))
                await asyncio.to_thread(server.start)
                done = policies[0].timings.steps
                await until(lambda: policies[0].timings.steps >= done + 3)
                assert [w.rejoins for w in (*policies, *rollouts)] == [0, 0, 0]
        assert_sound(url)
    finally:
        server.kill()


@pytest.mark.parametrize("killed", [False, True], ids=["leader lives", "leader killed"])
async def test_what_a_redis_forgot_with_the_end_of_its_file_is_trained_again_and_counted_once(
    tmp_path: Path, killed: bool
) -> None:
    """As after a power cut. A trainer holds weights, a plan and an epoch that nobody knows of."""
    redis_port, port = free_ports("127.0.0.1", 2)
    server = Server(tmp_path, "own", redis_port, "appendonly yes", 'save ""')
    url, file = server.url, tmp_path / "appendonlydir/appendonly.aof.1.incr.aof"
    model = make_tiny_model(tmp_path / "model", hidden=32)
    sections = {
        "redis": {"url": url},
        "model": {"path": str(model), "device": "cpu"},
        "controller": {"port": port},
        "train": {"max_staleness": 4, "checkpoint_every": 1000},
        "fleet": {"lease_ttl_s": 60.0},
    }
    trainer = None
    try:
        with running_controllers(tmp_path, 1, **sections) as controllers:
            control, config = control_of(controllers), config_of(controllers)
            async with working_fleet(controllers, policies=0) as (_, rollouts):
                for rollout in rollouts:
                    rollout.tokens = 8  # of the model's vocabulary
                where = addresses(controllers)[0]
                trainer = policy_process.start(config, where, "policy-0", tmp_path)

                async def reaches(step: int) -> bool:
                    return (await status(control)).step >= step

                await until(lambda: reaches(2))
                kept = file.stat().st_size
                forgotten = (await status(control)).step + 4
                await until(lambda: reaches(forgotten))
                before = await status(control)
                if killed:
                    controllers.started[0].kill()
                server.kill()
                os.truncate(file, kept)
                await asyncio.to_thread(server.start)
                if killed:
                    controllers.start("controller-0", port)
                await until(lambda: reaches(before.step + 2))
                assert (await status(control)).term > before.term
                assert trainer.is_alive() and [w.rejoins for w in rollouts] == [0, 0]
            await control.close()
        counts = assert_sound(url)
        assert counts["rollbacks"] >= 1, counts
    finally:
        if trainer is not None:
            trainer.kill()
        server.kill()


async def _waits_for_redis(control: ControlPlane) -> bool:
    return "Redis" in (await status(control)).phase


async def test_checkpoints_are_kept_until_a_replica_of_redis_has_the_record_of_the_next(
    tmp_path: Path,
) -> None:
    """A failover that lost the record would lead back to one whose files are gone."""
    sentinels = Sentinels(tmp_path, "line")
    replica = next(s for s in sentinels.servers if s is not sentinels.master())
    paths = [f"checkpoints/step-{number}" for number in range(1, 5)]
    try:
        config = {"redis": {"url": sentinels.url}, "train": {"keep_checkpoints": 1}}
        with running_controllers(tmp_path, 1, **config) as controllers:
            async with working_fleet(controllers) as (policies, _):
                trainer = policies[0]
                await until(lambda: trainer.timings.steps >= 5)

                async def record(number: int) -> list[str]:
                    request = policy_pb2.CheckpointRequest(
                        caller=trainer.session.caller, step=number, version=number,
                        path=paths[number - 1],
                        size_bytes=1,
                        seconds=0.0,
                        weights_digest=f"v{number}",
                    )  # fmt: skip
                    reply = await trainer.control.call("PolicyService.RecordCheckpoint", request)
                    return list(reply.obsolete_paths)

                await record(1)
                assert await record(2) == paths[:1]
                replica.process.send_signal(signal.SIGSTOP)
                assert await record(3) == []
                replica.process.send_signal(signal.SIGCONT)
                await asyncio.to_thread(redis_until, sentinels.master().replicates)
                assert await record(4) == paths[:3]
    finally:
        sentinels.close()


async def test_a_master_behind_sentinels_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    sentinels = Sentinels(tmp_path, "line")
    try:
        url, master = sentinels.url, sentinels.master()
        with running_controllers(tmp_path, 2, redis={"url": url}) as controllers:
            async with working_fleet(controllers) as (policies, _):
                await until(lambda: policies[0].timings.steps >= 3)
                # The replica has what was acknowledged: only then is nothing lost by a failover.
                assert await asyncio.to_thread(master.replicates)
                master.kill()
                done = policies[0].timings.steps
                await until(lambda: policies[0].timings.steps >= done + 3, 60.0)
                found = await status(policies[0].control)
                assert found.step >= done
        assert_sound(url)
    finally:
        sentinels.close()
