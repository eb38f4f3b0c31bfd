"""Redis as other people run it: an external server, and a master behind Sentinels."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from controller.verify import verify
from paceline.ports import free_ports
from paceline.redis_client import connect_sync
from paceline.redis_server import find_server
from tests.helpers.controllers import running_controllers, status, until, working_fleet


class Server:
    """redis-server (or a Sentinel) that someone else started."""

    def __init__(self, home: Path, name: str, port: int, *lines: str, sentinel: bool = False):
        self.port = port
        self._config = home / f"{name}.conf"
        self._config.write_text(
            "\n".join((f"port {port}", "bind 127.0.0.1", f'dir "{home}"', *lines)) + "\n"
        )
        self._options = ["--sentinel"] if sentinel else []
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [str(find_server()), str(self._config), *self._options], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 10
        while not self.answers():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.02)

    def answers(self) -> bool:
        try:
            return bool(redis.Redis(port=self.port, socket_timeout=1.0).ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def sentinels(home: Path, service: str) -> Iterator[tuple[str, Server]]:
    """(URL, master) of a master with one replica, watched by three Sentinels."""
    ports = free_ports("127.0.0.1", 5)
    durable = ("appendonly yes", 'save ""')
    master = Server(home, "master", ports[0], *durable, "appendfilename master.aof")
    following = (f"replicaof 127.0.0.1 {ports[0]}", "appendfilename replica.aof")
    started = [master, Server(home, "replica", ports[1], *durable, *following)]
    watching = (
        f"sentinel monitor {service} 127.0.0.1 {ports[0]} 2",
        f"sentinel down-after-milliseconds {service} 1000",
        f"sentinel failover-timeout {service} 5000",
    )
    try:
        for index, port in enumerate(ports[2:]):
            started.append(Server(home, f"sentinel-{index}", port, *watching, sentinel=True))
        deadline = time.monotonic() + 20
        asked = redis.Redis(port=ports[2], socket_timeout=1.0)
        while True:
            (known,) = (m for n, m in asked.sentinel_masters().items() if n == service)
            if known["num-slaves"] == 1 and known["num-other-sentinels"] == 2:
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports[2:])
        yield f"redis+sentinel://{hosts}/{service}", master
    finally:
        for server in started:
            server.kill()


def assert_sound(url: str) -> None:
    report = verify(url, "load")
    assert report.ok, report.problems
    assert report.counts["lost"] == report.counts["duplicates"] == 0


async def test_an_external_redis_killed_and_started_again_loses_nothing(tmp_path: Path) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    server = Server(tmp_path, "own", port, "appendonly yes", 'save ""')
    url = f"redis://127.0.0.1:{port}/0"
    try:
        with running_controllers(tmp_path, 2, redis={"url": url}) as controllers:
            async with working_fleet(controllers) as (policies, rollouts):
                await until(lambda: policies[0].timings.steps >= 3)
                server.kill()
                await asyncio.sleep(1.5)
                await asyncio.to_thread(server.start)
                done = policies[0].timings.steps
                await until(lambda: policies[0].timings.steps >= done + 3)
                assert [w.rejoins for w in (*policies, *rollouts)] == [0, 0, 0]
        assert_sound(url)
    finally:
        server.kill()


async def test_a_master_behind_sentinels_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    with (
        sentinels(tmp_path, "line") as (url, master),
        running_controllers(tmp_path, 2, redis={"url": url}) as controllers,
    ):
        async with working_fleet(controllers) as (policies, _):
            await until(lambda: policies[0].timings.steps >= 3)
            # The replica has what was acknowledged: only then is nothing lost by a failover.
            await asyncio.to_thread(connect_sync(url).wait, 1, 2000)
            master.kill()
            done = policies[0].timings.steps
            await until(lambda: policies[0].timings.steps >= done + 3, 60.0)
            found = await status(policies[0].control)
            assert found.step >= done
        assert_sound(url)
