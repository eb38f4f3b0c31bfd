"""No provider: surplus workers are drained, and missing ones are reported for others to start."""

from __future__ import annotations

from paceline.providers.base import Drain, Provider, desired_of, moves, staying
from paceline.v1 import admin_pb2
from paceline.worker_pools import role_of, scorer_of


class NoProvider(Provider):
    name = "none"

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    async def _converge_pool(self, pool: str, status: admin_pb2.StatusReply) -> str:
        here = staying(status, pool)
        desired = desired_of(status, pool)
        todo = moves(desired, here)
        for name in todo.drain:
            await self._drain(here[name])
        if not todo.start:
            return ""
        return (
            f"{todo.start} of {desired} {pool} workers are missing: start them with "
            f"`{command(status, pool)}`"
        )


def command(status: admin_pb2.StatusReply, pool: str) -> str:
    """The command that starts a worker of ``pool``."""
    scorer = f" --scorer {scorer_of(pool)}" if scorer_of(pool) else ""
    addresses = ",".join(c.address for c in status.controllers if c.state != "silent")
    return f"paceline {role_of(pool)} CONFIG{scorer} --controllers {addresses or 'HOST:PORT'}"
