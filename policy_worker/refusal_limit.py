"""Refusal limit: ends a replica after three equal refusals in a row.

A single refusal often concerns an incarnation that is over: the process registers as another one
and continues. A refusal that one incarnation meets again and again, with no step in between, will
not end by itself, and every attempt costs the other replicas a mesh epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UserError
from paceline.rpc.client import RequestRefused

LIMIT = 3


@dataclass
class RefusalLimit:
    """Counts refusals of one kind in a row; ``clear`` after a committed step."""

    worker_id: str
    _kind: tuple[int, str] = (0, "")
    _count: int = 0

    def add(self, incarnation: int, refusal: RequestRefused) -> None:
        """Raises UserError at the third of the same kind."""
        kind = (incarnation, refusal.code)
        self._count = self._count + 1 if kind == self._kind else 1
        self._kind = kind
        if self._count >= LIMIT:
            raise UserError(
                f"the controller refused {self.worker_id} {LIMIT} times in a row: {refusal}"
            ) from refusal

    def clear(self) -> None:
        self._count = 0
