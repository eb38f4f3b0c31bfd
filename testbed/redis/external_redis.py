"""External Redis servers: a standalone one, and a master and replica behind Sentinels."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis

from paceline.redis.server import find_server
from paceline.rpc.addresses import free_ports
from testbed.patience import Patience


def until(true: Callable[[], object], limit_s: float = 30.0) -> None:
    patience = Patience(limit_s)
    while not true():
        assert patience.left(), "it never became true"
        time.sleep(0.02)


class Server:
    """redis-server (or a Sentinel) that someone else started."""

    def __init__(self, home: Path, name: str, port: int, *lines: str, sentinel: bool = False):
        self.port = port
        self.client = redis.Redis(port=port, socket_timeout=1.0)
        self._config = home / f"{name}.conf"
        self._config.write_text(
            "\n".join((f"port {port}", "bind 127.0.0.1", f'dir "{home}"', *lines)) + "\n"
        )
        self._log = home / f"{name}.log"
        self._options = ["--sentinel"] if sentinel else []
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(find_server()), str(self._config), *self._options], stdout=log
            )
        until(lambda: self.process.poll() is not None or self.answers())
        assert self.process.poll() is None, f"the server at port {self.port} ended at once"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def replicates(self) -> bool:
        """Whether it is a master whose replica is in step with it."""
        try:
            role, *rest = self.client.execute_command("ROLE")
            return role == b"master" and len(rest[1]) == 1 and bool(self.client.wait(1, 1000))
        except redis.RedisError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Sentinels:
    """A master with one replica, watched by three Sentinels; ``url`` names the latter."""

    def __init__(self, home: Path, service: str) -> None:
        self._service = service
        ports = free_ports("127.0.0.1", 5)
        durable = ("appendonly yes", 'save ""')
        following = (f"replicaof 127.0.0.1 {ports[0]}", "appendfilename replica.aof")
        self.servers: list[Server] = []
        self.sentinels: list[Server] = []
        watching = (
            f"sentinel monitor {service} 127.0.0.1 {ports[0]} 2",
            f"sentinel down-after-milliseconds {service} 1000",
            f"sentinel failover-timeout {service} 5000",
        )
        try:
            self.servers += [
                Server(home, "master", ports[0], *durable, "appendfilename master.aof"),
            ]
            self.servers += [Server(home, "replica", ports[1], *durable, *following)]
            for index, port in enumerate(ports[2:]):
                self.sentinels += [
                    Server(home, f"sentinel-{index}", port, *watching, sentinel=True)
                ]
            until(self.settled)
        except BaseException:
            self.close()
            raise
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports[2:])
        self.url = f"redis+sentinel://{hosts}/{service}"

    def settled(self) -> bool:
        """All three know each other and the replica, which has what the master has."""
        for sentinel in self.sentinels:
            known = next(
                m for name, m in sentinel.client.sentinel_masters().items() if name == self._service
            )
            if known["num-slaves"] != 1 or known["num-other-sentinels"] != 2 or known["is_odown"]:
                return False
        return self.master().replicates()

    def master(self) -> Server:
        """As the first Sentinel has it."""
        _, port = self.sentinels[0].client.sentinel_get_master_addr_by_name(self._service)
        return next(server for server in self.servers if server.port == port)

    def close(self) -> None:
        for server in (*self.servers, *self.sentinels):
            server.kill()
