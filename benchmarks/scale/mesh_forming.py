"""Redis commands with which the members of one epoch meet: gloo, as threads of one process.

Threads share the interpreter, so the time is an upper bound; the number of commands is exact.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import redis
import torch

from paceline.config.sections.services import RedisConfig
from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.redis.server import ensure_redis, stop_redis

TIMEOUT_S = 300.0


def measure(members: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="paceline-mesh-") as name:
        directory = Path(name)
        endpoint = ensure_redis(directory, RedisConfig())
        client = redis.Redis.from_url(endpoint.url)
        try:
            before = _commands(client)
            began = time.monotonic()
            meshes = form(endpoint.url, members)
            seconds = time.monotonic() - began
            commands = _commands(client) - before - 1
            for mesh in meshes:
                mesh.abandon()
        finally:
            stop_redis(directory)
    return {"members": members, "commands": commands, "seconds": seconds}


def form(url: str, members: int, key: str = "paceline:scale:rdv:mesh:1:0") -> list[ProcessMesh]:
    """The mesh of every member, in rank order."""
    made: dict[int, ProcessMesh] = {}

    def join(rank: int) -> None:
        made[rank] = ProcessMesh.form(
            url=url,
            key=key,
            rank=rank,
            size=members,
            device=torch.device("cpu"),
            cancelled=lambda: False,
            timeout_s=TIMEOUT_S,
        )

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(members)]


def _commands(client: Any) -> int:
    return int(client.info("stats")["total_commands_processed"])
