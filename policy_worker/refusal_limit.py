"""When a replica that the controller keeps refusing gives up, instead of joining for ever anew.

A single refusal is often of an incarnation that is over: the process registers as another one and
goes on. The same refusal again and again of one incarnation, with no step in between, will not end
by itself, and every try costs the other replicas a mesh epoch.
"""

from __future__ import annotations

from paceline.errors import UserError
from paceline.rpc.client import RequestRefused

LIMIT = 3


class RefusedForGood(UserError):
    """The controller will not have this replica's calls."""


class RefusalLimit:
    """Counts refusals of one kind in a row; ``clear`` after a committed step."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._kind: tuple[int, str] = (0, "")
        self._count = 0

    def add(self, incarnation: int, refusal: RequestRefused) -> None:
        """Raises RefusedForGood at the third of the same kind."""
        kind = (incarnation, refusal.code)
        self._count = self._count + 1 if kind == self._kind else 1
        self._kind = kind
        if self._count >= LIMIT:
            raise RefusedForGood(
                f"the controller refused {self._worker_id} {LIMIT} times in a row: {refusal}"
            ) from refusal

    def clear(self) -> None:
        self._count = 0
