"""Local provider: the supervisor of ``paceline up`` starts, restarts and ends the processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from paceline.providers.base import Provider
from paceline.v1 import admin_pb2


class LocalProvider(Provider):
    """``reconcile``: the local fleet's own method, which also drains surplus workers."""

    name = "local"

    def __init__(self, reconcile: Callable[[admin_pb2.StatusReply], Awaitable[None]]) -> None:
        self._reconcile = reconcile

    async def converge(self, status: admin_pb2.StatusReply) -> str:
        await self._reconcile(status)
        return ""
