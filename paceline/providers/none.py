"""No provider: surplus workers are drained, and missing ones are reported for others to start."""

from __future__ import annotations

from paceline.providers.base import AT_WORK, ROLES, Drain, Provider, desired_of, moves, staying
from paceline.v1 import admin_pb2


class NoProvider(Provider):
    name = "none"

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    async def converge(self, status: admin_pb2.StatusReply) -> str:
        if status.phase not in AT_WORK:
            return ""
        missing = []
        for role in ROLES:
            if role not in status.desired:
                continue
            here = staying(status, role)
            todo = moves(desired_of(status, role), here)
            for name in todo.drain:
                await self._drain(here[name])
            if todo.start:
                missing.append(
                    f"{todo.start} of {desired_of(status, role)} {role} workers are missing: start "
                    f"them with `{command(status, role)}`"
                )
        return "; ".join(missing)


def command(status: admin_pb2.StatusReply, role: str) -> str:
    """The command that starts a worker of ``role``."""
    addresses = ",".join(c.address for c in status.controllers if c.state != "silent")
    return f"paceline {role} CONFIG --controllers {addresses or 'HOST:PORT'}"
