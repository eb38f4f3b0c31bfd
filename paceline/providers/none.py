"""No provider: surplus workers are drained, and missing ones are reported for others to start."""

from __future__ import annotations

from paceline.providers.base import Drain, Provider, desired_of, moves, staying
from paceline.v1 import admin_pb2


class NoProvider(Provider):
    name = "none"

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    async def _converge_role(self, role: str, status: admin_pb2.StatusReply) -> str:
        here = staying(status, role)
        desired = desired_of(status, role)
        todo = moves(desired, here)
        for name in todo.drain:
            await self._drain(here[name])
        if not todo.start:
            return ""
        return (
            f"{todo.start} of {desired} {role} workers are missing: start them with "
            f"`{command(status, role)}`"
        )


def command(status: admin_pb2.StatusReply, role: str) -> str:
    """The command that starts a worker of ``role``."""
    addresses = ",".join(c.address for c in status.controllers if c.state != "silent")
    return f"paceline {role} CONFIG --controllers {addresses or 'HOST:PORT'}"
