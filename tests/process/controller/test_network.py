"""The network between two roles drops, delays or splits: real controllers, real Redis, and workers
that speak the real protocol, with a proxy on the way that is under the test's thumb."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from paceline.config.sections.services import RedisConfig
from paceline.redis.server import ensure_redis
from paceline.rpc.addresses import free_ports
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable
from testbed.faults.tcp_proxy import TcpProxy
from testbed.fleets.controller_processes import ControllerProcess, Controllers
from testbed.fleets.controllers import (
    assert_sound,
    control_of,
    running_controllers,
    status,
    until,
    working_fleet,
)


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
