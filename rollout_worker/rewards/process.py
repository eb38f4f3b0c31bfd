"""The worker's end of one scoring process."""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.process.structured_log import event
from paceline.process.user_code import python_module
from rollout_worker.rewards.child import (
    BEAT,
    MOST_MESSAGE,
    STREAMS_LOST,
    BadMessage,
    read_message,
)
from rollout_worker.rewards.functions import Job, RewardError, ScoringFailed, Values

logger = logging.getLogger(__name__)

KILL_S = 10.0
SPARE_CALLS = 4
START_S = 120.0  # Longest import of the user's reward modules


OUTPUT_BYTES = 64 << 10
"""Output of a process that is copied in each OUTPUT_WINDOW_S. A reward that prints in each call of
a long run, or a gigabyte in one, must not fill the disk."""
OUTPUT_WINDOW_S = 60.0
WROTE = "a reward function wrote into the stream of scores"


class ProcessLost(ScoringFailed):
    """The process ended with this job in it. ``guilty``: True if the job's own call was running,
    False if another job's was, None if unknown. ``hung``: the process was killed because a call
    took too long."""

    def __init__(self, detail: str, *, guilty: bool | None, hung: bool = False) -> None:
        super().__init__("reward_timeout" if hung else "reward_crashed", detail)
        self.guilty = guilty


@dataclass(eq=False)
class ScoringProcess:
    """Started once by ``start``; takes jobs until it is lost, and is then replaced. ``freed``:
    called after each job that has left the process, and once it is lost."""

    functions: Sequence[str] | Mapping[str, float]
    timeout_s: float
    freed: Callable[[ScoringProcess], None]
    lost: bool = True  # True if the process takes no jobs: it has not started yet, or has ended
    components: list[tuple[str, float]] = field(default_factory=list)
    """Name and weight of each function's component."""
    waits: bool = False  # All functions are coroutine functions: many jobs at once make sense
    _jobs: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    """The jobs in the process; cancelled: its caller no longer waits."""
    _next: int = 0
    _hung: str = ""  # What took too long
    _answered_t: float = 0.0  # Of the newest answer, or of a job that came since
    _longest_s: float = 0.0
    """Time in which any job in the process is answered, if each call keeps its limit."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _process: asyncio.subprocess.Process | None = None
    _life: int = -1  # Write end of a pipe; the guard ends all processes when it is closed

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    async def start(self) -> None:
        """Starts the process and waits until it has imported its functions. Raises RewardError."""
        life, self._life = os.pipe()
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            self._beat = mmap.mmap(file.fileno(), BEAT.size)
            self._process = await asyncio.create_subprocess_exec(
                *python_module("rollout_worker.rewards.child"),
                str(self.timeout_s),
                str(file.fileno()),
                str(life),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                pass_fds=[file.fileno(), life],
                limit=MOST_MESSAGE,
                # A signal to the worker's process group does not reach it.
                start_new_session=True,
            )
        os.close(life)
        assert self._process.stdout is not None and self._process.stderr is not None
        # Not in the command line: names and patterns are nobody else's business.
        self._send(self.functions)
        # It ends with the process; also what is printed during the import is worth reading.
        self._tasks = [asyncio.create_task(_copy_output(self._process.stderr))]
        hello: dict[str, Any] | None
        try:
            hello = await asyncio.wait_for(read_message(self._process.stdout), START_S)
        except BadMessage as broken:
            hello = {"error": f"reward functions: {WROTE} while they were imported: {broken}"}
        except TimeoutError:
            hello = {"error": f"reward functions: their import took longer than {START_S:g} s"}
        if hello is None or "error" in hello:
            await self.close()
            ended = "reward functions: the process that imported them ended"
            raise RewardError(hello["error"] if hello else ended)
        self.components = [(name, weight) for name, weight in hello["ready"]]
        self.waits = hello["waits"]
        self.lost = False
        self._tasks += [
            asyncio.create_task(self._read(self._process.stdout)),
            asyncio.create_task(self._watch()),
        ]

    async def run(self, job: Job) -> tuple[Values, float]:
        """Values for each completion, and seconds spent on them. Raises ScoringFailed."""
        if self.lost:
            raise ProcessLost("the scoring process has ended", guilty=False)
        # Of the newest job: a change of the setting holds for what is under way as well.
        self.timeout_s = job.timeout_s or self.timeout_s
        number = self._next = self._next + 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._send({"id": number, "job": asdict(job)})
        if not self._jobs:
            self._answered_t = time.monotonic()
        self._jobs[number] = future
        # Calls that it may take, one after another, behind those of another job.
        calls = 2 * len(job) * len(self.components) + SPARE_CALLS
        self._longest_s = max(self._longest_s, self.timeout_s * calls)
        answer = await future
        if "scores" in answer:
            return answer["scores"], answer["seconds"]
        place = answer.get("number")
        raise ScoringFailed(
            answer["reason"],
            answer["detail"],
            trace=str(answer.get("trace") or ""),
            number=place if isinstance(place, int) else None,
        )

    async def close(self) -> None:
        self.lost = True
        if self._process is None:
            return
        self._kill()
        await self._ended()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        how = ""
        try:
            while (message := await read_message(stream)) is not None:
                future = self._jobs.pop(_answered(message, self._jobs))
                self._answered_t = time.monotonic()
                if not future.done():
                    future.set_result(message)
                self.freed(self)
        except BadMessage as broken:
            how = f"{WROTE}: {broken}"
        assert self._process is not None
        closed, self.lost = self.lost, True
        # Surviving children would hold its pipes and use processor time.
        self._kill()
        code = await self._ended()
        if code == STREAMS_LOST:
            how = "a reward function closed the descriptors that scores travel through"
        _, running = BEAT.unpack_from(self._beat, 0)
        detail = self._hung or how or f"the scoring process ended with status {code}"
        for number, future in self._jobs.items():
            if not future.done():
                known = self.jobs == 1 or running in self._jobs
                guilty = (self.jobs == 1 or number == running) if known else None
                future.set_exception(ProcessLost(detail, guilty=guilty, hung=bool(self._hung)))
        if not closed:
            self.freed(self)

    async def _watch(self) -> None:
        """Kills the process if a call hangs: then its event loop sends no heartbeat."""
        while True:
            await asyncio.sleep(min(0.25, self.timeout_s / 4))
            beat, _ = BEAT.unpack_from(self._beat, 0)
            now = time.monotonic()
            silent = ""
            if now - beat > self.timeout_s:
                silent = f"a call took longer than {self.timeout_s:g} s"
            elif now - self._answered_t > self._longest_s:
                # It lives: whatever a reward did to the process, an answer will not come.
                silent = f"no scores came for {self._longest_s:g} s"
            if self.jobs and not self.lost and silent:
                self._hung = silent
                self._kill()
                await self._ended()
                return

    def _send(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _ended(self) -> int:
        """The exit status, once the process has ended."""
        assert self._process is not None
        try:
            async with asyncio.timeout(KILL_S):
                return await self._process.wait()
        except TimeoutError:
            # A reward may have stopped the guard.
            self._process.kill()
            return await self._process.wait()

    def _kill(self) -> None:
        """Has the guard kill the scoring process with all that rewards started in it."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1


async def _copy_output(stream: asyncio.StreamReader) -> None:
    left, began = OUTPUT_BYTES, time.monotonic()
    # More than the pipe gives at once: the stream's own limit is that of a line of scores.
    while data := await stream.read(1 << 20):
        if time.monotonic() - began >= OUTPUT_WINDOW_S:
            left, began = OUTPUT_BYTES, time.monotonic()
        if left >= 0:
            sys.stderr.write(data[:left].decode(errors="replace"))
            sys.stderr.flush()
            if len(data) > left:
                event(logger, "reward output left out for a minute", logging.WARNING)
        left -= len(data)


def _answered(message: dict[str, Any], jobs: Mapping[int, Any]) -> int:
    """The job that ``message`` answers. Raises BadMessage for anything that is no answer."""
    number = message.get("id")
    whole = (
        isinstance(message.get("scores"), list) and isinstance(message.get("seconds"), float)
        if "scores" in message
        else isinstance(message.get("reason"), str) and isinstance(message.get("detail"), str)
    )
    if not isinstance(number, int) or number not in jobs or not whole:
        raise BadMessage("no answer to a job")
    return number
