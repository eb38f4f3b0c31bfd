"""The worker's handle on one process of the scoring pool."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.process.user_code import python_module
from rollout_worker.rewards.child import BEAT, encode_message, read_message
from rollout_worker.rewards.functions import RewardError
from rollout_worker.rewards.score import Job

START_S = 120.0
"""Longest import of the user's reward modules."""


class ProcessLost(Exception):
    """The process ended with this job in it.

    ``guilty``: True where the job's own call was running, False where another's was, None where it
    cannot be told. ``hung``: it was killed because a call took too long.
    """

    def __init__(self, detail: str, *, guilty: bool | None, hung: bool = False) -> None:
        super().__init__(detail)
        self.guilty = guilty
        self.hung = hung


class ScoringProcess:
    """Started once by ``start``; takes jobs until it is lost, and is then replaced.

    ``freed``: called where this happens without a caller of ``run`` to notice: it is lost, or a job
    that nobody waits for any more has ended.
    """

    def __init__(
        self,
        functions: Sequence[str] | Mapping[str, float],
        timeout_s: float,
        freed: Callable[[ScoringProcess], None],
    ) -> None:
        self._functions = functions
        self._timeout_s = timeout_s
        self._freed = freed
        self._jobs: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._forsaken: set[int] = set()
        """Jobs that nobody waits for any more and that are still in the process."""
        self._next = 0
        self._hung = False
        self._tasks: list[asyncio.Task[None]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._life = -1
        """Our end of a pipe that the process's group outlives by no more than an instant."""
        self.lost = False
        self.components: list[tuple[str, float]] = []
        """Name and weight of each function's component."""
        self.waits = False
        """All functions are coroutine functions: many jobs at once make sense."""

    @property
    def jobs(self) -> int:
        return len(self._jobs) + len(self._forsaken)

    async def start(self) -> None:
        """Starts the process and waits until it has imported its functions. Raises RewardError."""
        life, self._life = os.pipe()
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            self._beat = mmap.mmap(file.fileno(), BEAT.size)
            self._process = await asyncio.create_subprocess_exec(
                *python_module("rollout_worker.rewards.child"),
                json.dumps(self._functions),
                str(self._timeout_s),
                str(file.fileno()),
                str(life),
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=[file.fileno(), life],
                # Its own process group: what a reward started is killed with it.
                start_new_session=True,
            )
        os.close(life)
        assert self._process.stdout is not None
        try:
            hello = await asyncio.wait_for(read_message(self._process.stdout), START_S)
        except TimeoutError:
            hello = {"error": f"reward functions: their import took longer than {START_S:g} s"}
        if hello is None:
            hello = {"error": "reward functions: the process that imported them ended"}
        if "error" in hello:
            await self.close()
            raise RewardError(hello["error"])
        self.components = [(name, weight) for name, weight in hello["ready"]]
        self.waits = hello["waits"]
        self._tasks = [
            asyncio.create_task(self._read(self._process.stdout)),
            asyncio.create_task(self._watch()),
        ]

    async def run(self, job: Job) -> dict[str, Any]:
        """The process's answer to ``job``. Raises ProcessLost."""
        assert self._process is not None and self._process.stdin is not None
        if self.lost:
            raise ProcessLost("the scoring process has ended", guilty=False)
        self._next += 1
        number = self._next
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._jobs[number] = future
        try:
            self._process.stdin.write(encode_message({"id": number, "job": asdict(job)}))
            return await future
        finally:
            del self._jobs[number]
            if future.cancelled():
                self._forsaken.add(number)

    async def close(self) -> None:
        """Kills the process and whatever it started in its group. Idempotent."""
        self.lost = True
        if self._process is None:
            return
        self._kill()
        await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while (message := await read_message(stream)) is not None:
            if message["id"] in self._forsaken:
                self._forsaken.remove(message["id"])
                self._freed(self)
            future = self._jobs.get(message["id"])
            if future is not None and not future.done():
                future.set_result(message)
        assert self._process is not None
        closed, self.lost = self.lost, True
        # Children that outlived it would hold its pipes and its processor time.
        self._kill()
        code = await self._process.wait()
        _, running = BEAT.unpack_from(self._beat, 0)
        for number, future in self._jobs.items():
            if future.done():
                continue
            known = running in self._jobs or running in self._forsaken
            guilty = number == running if known else None
            if self.jobs == 1:
                guilty = True
            detail = (
                f"a call took longer than {self._timeout_s:g} s"
                if self._hung
                else f"the scoring process ended with status {code}"
            )
            future.set_exception(ProcessLost(detail, guilty=guilty, hung=self._hung))
        if not closed:
            self._freed(self)

    async def _watch(self) -> None:
        """Kills the process where a call has hung it: its event loop then gives no sign of life."""
        while True:
            await asyncio.sleep(min(0.25, self._timeout_s / 4))
            beat, _ = BEAT.unpack_from(self._beat, 0)
            if self.jobs and time.monotonic() - beat > self._timeout_s:
                self._hung = True
                self._kill()
                return

    def _kill(self) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
