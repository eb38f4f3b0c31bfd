"""Requests for the stacks of workers, which their sessions answer.

GetStacks ──► directive.stacks_request = n ──► session ──► SendStacks(n) ──► the caller
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from paceline.v1 import worker_pb2

ANSWER_S = 5.0


@dataclass(slots=True)
class StackRequests:
    """Of one leader. Numbers are milliseconds of the clock, so a later leader's are higher."""

    _numbers: dict[str, int] = field(default_factory=dict)
    """Newest request by worker id."""
    _waiting: dict[str, list[asyncio.Future[str]]] = field(default_factory=dict)

    def number(self, worker_id: str) -> int:
        return self._numbers.get(worker_id, 0)

    def ask(self, worker_id: str, now_t: float) -> asyncio.Future[str]:
        """``now_t``: Unix seconds."""
        self._numbers[worker_id] = max(self.number(worker_id) + 1, int(now_t * 1e3))
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(worker_id, []).append(future)
        return future

    def answer(self, report: worker_pb2.StacksReport) -> None:
        worker_id = report.caller.worker_id
        # An answer to an older request is of an older moment.
        if report.request < self.number(worker_id):
            return
        for future in self._waiting.pop(worker_id, []):
            if not future.done():
                future.set_result(report.stacks)

    def forget(self, worker_id: str, future: asyncio.Future[str]) -> None:
        """Its caller no longer waits."""
        waiting = self._waiting.get(worker_id, [])
        if future in waiting:
            waiting.remove(future)
        if not waiting:
            self._waiting.pop(worker_id, None)
