"""Controllers that die, hang, or lose Redis, and networks that drop, delay or split: the run goes
on, nothing is lost or done twice."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from controller.store.journal import Journal, Position
from controller.store.redis_keys import Keys
from paceline.config.sections.services import RedisConfig
from paceline.redis.client import connect, connect_sync
from paceline.redis.server import ensure_redis
from paceline.rpc.addresses import free_ports
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable
from paceline.v1 import rollout_pb2
from testbed.faults.tcp_proxy import TcpProxy
from testbed.fleets.controller_processes import ControllerProcess, Controllers
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
from testbed.redis.full_redis import full_redis
from testbed.workers.fake_workers import FakeRollout


async def journalled(url: str) -> list[tuple[int, dict[str, Any]]]:
    """(term, event) of everything in the journal."""
    redis, keys = connect(url), Keys("load")
    journal = Journal(redis, keys)
    found, at = [], Position()
    while entries := await journal.read(at):
        found += [(entry.term, event) for entry in entries for event in entry.events]
        at = entries[-1].at
    await redis.aclose()
    return found


async def test_standby_gives_the_same_replies_after_the_leader_is_killed(tmp_path: Path) -> None:
    with running_controllers(tmp_path, 2, train={"max_staleness": 8}) as controllers:
        async with working_fleet(controllers, rollouts=0):
            worker = FakeRollout(
                config_of(controllers), addresses(controllers), "rollout-9", tasks_a_lease=2
            )
            await worker.start()
            await until(lambda: worker.version >= 0)
            leased = await worker.lease()
            group = worker.group_for(leased.leases[0])
            submitted = await worker.stored([group])
            first = await worker.control.call("RolloutService.SubmitGroups", submitted)
            assert first.results[0].verdict == rollout_pb2.VERDICT_ACCEPTED

            controllers.started[0].kill()
            again = await worker.control.call("RolloutService.SubmitGroups", submitted)
            assert again.results[0].verdict == rollout_pb2.VERDICT_DUPLICATE
            worker.lease_seq -= 1
            assert (await worker.lease()).leases == leased.leases
            assert worker.rejoins == 0
            await worker.stop(goodbye=False)
        state = await status(control_of(controllers, [controllers.started[1].address]))
        assert state.failovers == 1 and state.leader == "controller-1"
        assert state.tasks.dispatched == 2
        assert_sound(controllers.redis_url)


async def test_a_leader_that_hung_past_its_lease_writes_nothing_when_it_wakes(
    tmp_path: Path,
) -> None:
    with running_controllers(tmp_path, 2) as controllers:
        leader, standby = controllers.started
        async with working_fleet(controllers) as (policies, _):
            await until(lambda: policies[0].timings.steps >= 3)
            leader.freeze()
            done = policies[0].timings.steps
            await until(lambda: policies[0].timings.steps >= done + 5)
            leader.thaw()
            done = policies[0].timings.steps
            await until(lambda: policies[0].timings.steps >= done + 5)
            assert all(worker.rejoins == 0 for worker in policies)
        found = await journalled(controllers.redis_url)
        terms = [term for term, _ in found]
        assert terms == sorted(terms) and len(set(terms)) == 2
        begun = [e["controller_id"] for _, e in found if e["type"] == "TermBegun"]
        assert begun == [leader.id, standby.id]
        # It noticed, threw its memory away and is a standby again.
        await until(lambda: "stepping down" in controllers.log(leader.id))
        await until(lambda: follows(controllers, leader, standby.id))
        assert_sound(controllers.redis_url)


async def test_redis_that_hangs_pauses_the_run_and_kills_nobody(tmp_path: Path) -> None:
    with running_controllers(tmp_path, 1, fleet={"lease_ttl_s": 2.0}) as controllers:
        async with working_fleet(controllers) as (policies, rollouts):
            await until(lambda: policies[0].timings.steps >= 3)
            os.kill(controllers.redis_pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(4.0)
                state = await status(policies[0].control)
                assert "Redis" in state.phase
                done = policies[0].timings.steps
            finally:
                os.kill(controllers.redis_pid, signal.SIGCONT)
            await until(lambda: policies[0].timings.steps >= done + 3)
            assert [w.rejoins for w in (*policies, *rollouts)] == [0, 0, 0]
        assert_sound(controllers.redis_url)


async def test_full_redis_is_a_clear_state_and_no_loss(tmp_path: Path) -> None:
    """For longer than the leader's lease, with a standby that would take it."""
    with running_controllers(
        tmp_path, 2, controller={"leader_lease_s": 1.0}, redis={"maxmemory_mb": 24}
    ) as controllers:
        client = connect_sync(controllers.redis_url)
        async with working_fleet(controllers) as (policies, rollouts):
            await until(lambda: policies[0].timings.steps >= 3)

            async def paused() -> bool:
                return bool((await status(policies[0].control)).phase == "paused: Redis full")

            with full_redis(client):
                await until(paused)
                # Nothing is to happen: there is no event to wait for.
                await asyncio.sleep(2.5)
                assert await paused()
            done = policies[0].timings.steps
            await until(lambda: policies[0].timings.steps >= done + 3)
            assert [w.rejoins for w in (*policies, *rollouts)] == [0, 0, 0]
            assert (await status(policies[0].control)).failovers == 0, "the leader kept its lease"
        assert_sound(controllers.redis_url)


async def test_a_leader_told_to_end_hands_over_at_once(tmp_path: Path) -> None:
    # The lease outlasts every wait below: only a hand-over gives it to the standby in time.
    with running_controllers(tmp_path, 2, controller={"leader_lease_s": 600.0}) as controllers:
        leader, standby = controllers.started
        await until(lambda: leads(controllers, leader))
        leader.process.terminate()
        assert await asyncio.to_thread(leader.process.wait, 10) == 0
        await until(lambda: leads(controllers, standby))


@contextmanager
def behind_proxies(directory: Path, number: int) -> Iterator[tuple[Controllers, list[TcpProxy]]]:
    """Controllers that each reach Redis through a proxy of its own. Workers reach their payloads
    directly."""
    url = ensure_redis(directory / "run", RedisConfig()).url
    login, path = urlsplit(url).netloc.rpartition("@")[0], urlsplit(url).path
    proxies = [TcpProxy(path) for _ in range(number)]
    try:
        with running_controllers(directory, 0) as controllers:
            for index, proxy in enumerate(proxies):
                through = f"redis://{login}@{proxy.address}/0"
                urls = f'redis.url="{through}"', f'payloads.url="{url}"'
                start_with(controllers, f"controller-{index}", *urls)
            yield controllers, proxies
    finally:
        for proxy in proxies:
            proxy.close()


def start_with(controllers: Controllers, name: str, *overrides: str) -> ControllerProcess:
    controllers.options = [option for o in overrides for option in ("--set", o)]
    return controllers.start(name)


async def test_a_leader_cut_off_from_redis_but_not_from_its_workers_is_succeeded(
    tmp_path: Path,
) -> None:
    with behind_proxies(tmp_path, 2) as (controllers, proxies):
        async with working_fleet(controllers) as (policies, rollouts):
            await until(lambda: policies[0].timings.steps >= 3)
            proxies[0].partition()
            await until(lambda: leads(controllers, controllers.started[1]))
            done = policies[0].timings.steps
            await until(lambda: policies[0].timings.steps >= done + 5)
            # Healed, the deposed one finds the fence and follows.
            proxies[0].heal()
            await until(lambda: follows(controllers, controllers.started[0], "controller-1"))
            done = policies[0].timings.steps
            await until(lambda: policies[0].timings.steps >= done + 5)
            assert [w.rejoins for w in (*policies, *rollouts)] == [0, 0, 0]
        assert_sound(controllers.redis_url)


async def leads(controllers: Controllers, controller: ControllerProcess) -> bool:
    return await follows(controllers, controller, controller.id)


async def follows(controllers: Controllers, controller: ControllerProcess, leader: str) -> bool:
    control = control_of(controllers, [controller.address])
    try:
        return bool((await status(control)).leader == leader)
    except ControlPlaneUnavailable:
        return False
    finally:
        await control.close()


async def test_workers_cut_off_from_the_leader_only_come_back_without_a_loss(
    tmp_path: Path,
) -> None:
    """Shorter than their lease they stay who they are; longer, they are dead and join anew."""
    (port,) = free_ports("127.0.0.1", 1)
    sections = {"fleet": {"lease_ttl_s": 1.5}, "controller": {"port": port}}
    with running_controllers(tmp_path, 1, **sections) as controllers:
        with TcpProxy(("127.0.0.1", port)) as proxy:
            async with working_fleet(controllers, where=[proxy.address]) as (policies, rollouts):
                await until(lambda: policies[0].timings.steps >= 3)
                workers = (*policies, *rollouts)
                direct = control_of(controllers)
                proxy.partition()
                # Shorter than the lease: nothing is to happen that could be awaited.
                await asyncio.sleep(0.5)
                proxy.heal()
                done = policies[0].timings.steps
                await until(lambda: policies[0].timings.steps >= done + 3)
                assert [w.rejoins for w in workers] == [0, 0, 0]

                proxy.partition()
                await until(lambda: _all_dead(direct, len(workers)))
                proxy.heal()
                done = policies[0].timings.steps
                await until(lambda: policies[0].timings.steps >= done + 3)
                await until(lambda: [w.rejoins for w in workers] == [1, 1, 1])
                await direct.close()
        assert_sound(controllers.redis_url)


async def _all_dead(control: ControlPlane, count: int) -> bool:
    dead = [w for w in (await status(control)).workers if w.state == "dead"]
    return len(dead) >= count
