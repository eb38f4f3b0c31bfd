"""Fleets for the trials. Cases with equal settings share a fleet, one after the other."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from paceline.rpc.addresses import free_ports
from testbed.faults.tcp_proxy import TcpProxy
from testbed.fleets.launched_fleet import LaunchedFleet
from testbed.fleets.namespaced_fleet import NamespacedFleet
from testbed.redis.external_redis import Sentinels, Server
from testbed.rewards import KILLS

POISONED_EVERY = 16
"""Rows for each one that kills."""
Ground = Callable[[Path], AbstractContextManager[Any]]
"""Opens, in an empty directory, the fleet that trials meet."""


def usual(adapters: bool = False, **fleet: int) -> Ground:
    """``paceline up`` with its embedded Redis; ``fleet``: what is not as by default."""
    model = {"lora": {"rank": 4}} if adapters else {}
    return lambda where: closing(LaunchedFleet(where, fleet=fleet, model=model))


class ForeignRedis(LaunchedFleet):
    """A fleet whose Redis is a server that somebody else runs, at the far end of a proxy."""

    def __init__(self, where: Path) -> None:
        (port,) = free_ports("127.0.0.1", 1)
        self.server = Server(where, "own", port, "appendonly yes", 'save ""')
        self.proxy = TcpProxy(("127.0.0.1", port))
        super().__init__(where, redis_url=f"redis://127.0.0.1:{self.proxy.port}/0")

    def close(self) -> None:
        super().close()
        self.proxy.close()
        self.server.kill()


class WatchedByThree(LaunchedFleet):
    """A fleet on a master with one replica, behind three Sentinels."""

    def __init__(self, where: Path) -> None:
        self.sentinels = Sentinels(where, "line")
        super().__init__(where, redis_url=self.sentinels.url)

    def close(self) -> None:
        super().close()
        self.sentinels.close()


def _poisoned(where: Path) -> AbstractContextManager[LaunchedFleet]:
    """A fleet in which one of sixteen prompts kills the process that scores it."""
    path = where / "poisoned.jsonl"
    rows = ({"prompt": f"s{i}=", "answer": str(i)} for i in range(10, 138))
    lines = [
        json.dumps(row if (number + 1) % POISONED_EVERY else {**row, "answer": KILLS})
        for number, row in enumerate(rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    reward = {"functions": ["testbed.rewards:poison"], "processes": 2}
    return closing(LaunchedFleet(where, data={"path": str(path)}, reward=reward))


HOSTS = "hosts"
"""Ground with every process on a host of its own; needs root."""
FLEETS: dict[str, dict[str, Any]] = {
    "usual": {},
    "one": {"policy": 1},
    "three": {"policy": 3},
    "ranks": {"policy_ranks": 2},
}
"""Fleets that can train adapters as well as the whole model."""
GROUNDS: dict[str, Ground] = {
    **{name: usual(**fleet) for name, fleet in FLEETS.items()},
    **{f"{name}, adapters": usual(adapters=True, **fleet) for name, fleet in FLEETS.items()},
    "foreign_redis": lambda where: closing(ForeignRedis(where)),
    "sentinels": lambda where: closing(WatchedByThree(where)),
    "poisoned": _poisoned,
    HOSTS: lambda where: closing(NamespacedFleet(where)),
}
