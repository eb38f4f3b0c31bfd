"""An engine without a model: each request runs until the test lets it finish."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from rollout_worker.engine.base import (
    Aborted,
    Completion,
    Engine,
    EngineError,
    EngineStats,
    Finish,
    Request,
)


class ScriptedEngine(Engine):
    """``finish(task_id)`` gives a task's samples ``tokens``; with ``at_once`` all finish unasked."""

    def __init__(self, *, at_once: bool = False, tokens: tuple[int, ...] = (4, 5, 2)) -> None:
        self.at_once = at_once
        self.tokens = tokens
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.loads: list[int] = []
        self.load_error: Exception | None = None
        """What the next load raises."""
        self.load_gate = asyncio.Event()
        """A load lasts until it is open."""
        self.load_gate.set()
        self._failure: asyncio.Future[None] | None = None
        self._running: dict[str, tuple[Request, asyncio.Future[None]]] = {}
        self._version = -1

    @property
    def running(self) -> set[str]:
        """Ids of the tasks whose requests are running."""
        return {request_id.split("/")[0] for request_id in self._running}

    def finish(self, task_id: str, attempt: int = 1) -> None:
        self._running[f"{task_id}/{attempt}"][1].set_result(None)

    def spoil(self, task_id: str, error: Exception, attempt: int = 1) -> None:
        """The task's generation fails with ``error``."""
        self._running[f"{task_id}/{attempt}"][1].set_exception(error)

    def fail(self, error: Exception) -> None:
        """As if it had died of itself."""
        assert self._failure is not None
        self._failure.set_exception(error)

    async def until_failure(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        await self._failure

    async def start(self) -> None: ...

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        if request.request_id in self._running:
            raise EngineError(f"request {request.request_id} is already running")
        self.requests.append(request)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running[request.request_id] = request, done
        try:
            if not self.at_once:
                await done
        finally:
            del self._running[request.request_id]
        n = len(self.tokens)
        sample = Completion(
            np.array(self.tokens, np.int32),
            np.full(n, -0.5, np.float32),
            ((self._version, n),),
            Finish.STOP,
        )
        return (sample,) * request.count

    def abort(self, request_id: str) -> None:
        if request_id in self._running and not self._running[request_id][1].done():
            self.aborted.append(request_id.split("/")[0])
            done = self._running[request_id][1]
            done.set_exception(Aborted(request_id))
            # Whoever waited may have been cancelled as well.
            done.exception()

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        if self.load_error is not None:
            raise self.load_error
        self.loads.append(version)
        await self.load_gate.wait()
        self._version = version
        return 0.0

    @property
    def version(self) -> int:
        return self._version

    @property
    def vocabulary(self) -> int:
        return 1000

    @property
    def max_context(self) -> int:
        return 88

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._running))

    async def close(self) -> None: ...
