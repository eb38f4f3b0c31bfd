"""The scoring pool: processes that may hang or die without harm to the worker.

    score(job) ──► least loaded process with room ──► scores
                        │ ended or hung
                        ├─ during this job's call ──► reward_crashed | reward_timeout
                        ├─ during another job's ────► scored again in the pool
                        └─ unknown ─────────────────► scored again in its own process

A lost process is replaced at once. A job is never blamed for another job's crash.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from paceline.process.structured_log import event
from rollout_worker.rewards.functions import RewardError
from rollout_worker.rewards.process import ProcessLost, ScoringProcess
from rollout_worker.rewards.score import Components, Job, ScoringFailed

logger = logging.getLogger(__name__)

_DEPTH = 2
"""Jobs in a process whose functions do not wait: one running, one queued."""
_DEPTH_WAITING = 128
"""Jobs in a process whose functions only wait (for a sandbox, a judge)."""


class ScoringPool:
    def __init__(
        self, functions: Sequence[str] | Mapping[str, float], *, processes: int, timeout_s: float
    ) -> None:
        self._functions = functions
        self._timeout_s = timeout_s
        self._processes = [self._new() for _ in range(processes)]
        self._depth = _DEPTH
        self._room = asyncio.Event()
        self._closing = False
        self._restarts: set[asyncio.Task[None]] = set()
        self.components: list[tuple[str, float]] = []

    async def start(self) -> None:
        """Imports the functions in every process. Raises RewardError with one line."""
        results = await asyncio.gather(
            *(process.start() for process in self._processes), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                await self.close()
                raise result
        first = self._processes[0]
        self.components = first.components
        self._depth = _DEPTH_WAITING if first.waits else _DEPTH

    async def score(self, job: Job) -> tuple[Components, float]:
        """Components for each completion, and seconds spent on them. Raises ScoringFailed."""
        while True:
            process = await self._take()
            try:
                return await process.run(job)
            except ProcessLost as lost:
                if lost.guilty:
                    raise
                if lost.guilty is None:
                    return await self._isolated(job)

    async def close(self) -> None:
        self._closing = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self._processes))

    async def _take(self) -> ScoringProcess:
        while True:
            alive = [p for p in self._processes if not p.lost and p.jobs < self._depth]
            if alive:
                return min(alive, key=lambda p: p.jobs)
            self._room.clear()
            await self._room.wait()

    async def _isolated(self, job: Job) -> tuple[Components, float]:
        process = self._new()
        try:
            await process.start()
            return await process.run(job)
        except RewardError as error:
            raise ScoringFailed("reward_crashed", str(error)) from None
        finally:
            await process.close()

    def _new(self) -> ScoringProcess:
        return ScoringProcess(self._functions, self._timeout_s, self._freed)

    def _freed(self, process: ScoringProcess) -> None:
        if process.lost and process in self._processes and not self._closing:
            event(logger, "scoring process lost, starting another", logging.WARNING)
            fresh = self._new()
            self._processes[self._processes.index(process)] = fresh
            task = asyncio.create_task(self._restart(process, fresh))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)
        self._room.set()

    async def _restart(self, old: ScoringProcess, fresh: ScoringProcess) -> None:
        await old.close()
        while True:
            try:
                await fresh.start()
                break
            except (RewardError, OSError) as error:
                # The import succeeded before; perhaps the machine is out of memory. Jobs wait.
                event(logger, "scoring process does not start", logging.ERROR, error=error)
                await asyncio.sleep(1.0)
        self._room.set()
