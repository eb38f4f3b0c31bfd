"""The worker's end of a process that runs code of users, and a pool of them.

start ──► ready ──► calls in it ──► answers
            │ ended, killed, or it wrote what is no message
            └──► every call in it fails; the pool starts another process at once
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from paceline.process.structured_log import event
from paceline.user_code import python_module
from paceline.user_code.child import BEAT, MOST_MESSAGE, STREAMS_LOST, BadMessage, read_message

logger = logging.getLogger(__name__)

KILL_S = 10.0
START_S = 120.0  # Longest import of the user's modules
RESTART_S = 1.0

OUTPUT_BYTES = 64 << 10
"""Output of a process that is copied in each OUTPUT_WINDOW_S. A reward that prints in each call of
a long run, or a gigabyte in one, must not fill the disk."""
OUTPUT_WINDOW_S = 60.0


class UserProcess(ABC):
    """Started once by ``start``; takes calls until it is lost, and is then replaced. ``freed``:
    called after each call that has left the process, and once it is lost."""

    module: ClassVar[str]  # Of the child, which it runs
    name: ClassVar[str]  # For people: "scoring process"
    what: ClassVar[str]  # The user's code, for people: "reward functions"
    writer: ClassVar[str]  # One of them: "a reward function"
    refusal: ClassVar[type[Exception]]  # Raised by ``start``, with one line

    def __init__(self, freed: Callable[[Any], None]) -> None:
        self.lost = True  # It takes no calls: it has not started yet, or has ended
        self.freed = freed
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """The calls in the process; cancelled: its caller no longer waits."""
        self._next = 0
        self._hung = ""  # Why it was killed
        self._answered_t = 0.0  # Of the newest answer, or of a call that came since
        self._tasks: list[asyncio.Task[None]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._life = -1  # Write end of a pipe; the guard ends all processes when it is closed

    @property
    def jobs(self) -> int:
        return len(self._calls)

    @abstractmethod
    def first(self) -> dict[str, Any]:
        """The ``given`` of the child: code to load, and settings."""

    @abstractmethod
    def loss(self, number: int, running: int, detail: str) -> Exception:
        """The failure of call ``number`` in a process that has ended while the call ``running`` had
        it; 0: none, or not known."""

    def answers(self, message: dict[str, Any]) -> bool:
        """True if ``message`` answers a call; else it was taken. Raises BadMessage."""
        return True

    def command(self) -> tuple[str, ...]:
        return python_module(self.module)

    async def start(self) -> dict[str, Any]:
        """Starts the process and waits until it has loaded the user's code. Raises ``refusal``."""
        life, self._life = os.pipe()
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            self._beat = mmap.mmap(file.fileno(), BEAT.size)
            self._process = await asyncio.create_subprocess_exec(
                *self.command(),
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
        self.send(self.first())
        # It ends with the process; also what is printed during the import is worth reading.
        self._tasks = [asyncio.create_task(_copy_output(self._process.stderr, self.writer))]
        hello: dict[str, Any] | None
        try:
            hello = await asyncio.wait_for(read_message(self._process.stdout), START_S)
        except BadMessage as broken:
            hello = {"error": f"{self.what}: {self._wrote} during the import: {broken}"}
        except TimeoutError:
            hello = {"error": f"{self.what}: the import took longer than {START_S:g} s"}
        if hello is None or "error" in hello:
            await self.close()
            ended = f"{self.what}: the process ended during the import"
            raise self.refusal(hello["error"] if hello else ended)
        self.lost = False
        self._tasks.append(asyncio.create_task(self._read(self._process.stdout)))
        return hello

    def call(self, message: dict[str, Any]) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        """Sends ``message`` with a number; the number, and the answer to come."""
        number = self._next = self._next + 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.send({"id": number, **message})
        if not self._calls:
            self._answered_t = time.monotonic()
        self._calls[number] = future
        return number, future

    def send(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def beat(self) -> tuple[float, int]:
        """Seconds since the newest heartbeat, and the call that ran then; 0: none."""
        beat_t, running = BEAT.unpack_from(self._beat, 0)
        return time.monotonic() - beat_t, running

    async def kill(self, why: str) -> None:
        """Ends the process and all that it has started; its calls fail."""
        self._hung = why
        self._kill()
        await self._ended()

    async def close(self) -> None:
        self.lost = True
        if self._process is None:
            return
        self._kill()
        await self._ended()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def _wrote(self) -> str:
        return f"{self.writer} wrote into the stream of messages"

    async def _read(self, stream: asyncio.StreamReader) -> None:
        how, guilty = "", 0
        try:
            while (message := await read_message(stream)) is not None:
                number = message.get("id")
                if not isinstance(number, int) or not 0 < number <= self._next:
                    raise BadMessage("no answer to a job")
                if number not in self._calls:
                    if "call" in message:
                        continue  # of a task that a call has left behind
                    raise BadMessage("a second answer to a job")
                if not self.answers(message):
                    continue
                future = self._calls.pop(number)
                self._answered_t = time.monotonic()
                if not future.done():
                    future.set_result(message)
                self.freed(self)
        except BadMessage as broken:
            how, guilty = f"{self._wrote}: {broken}", broken.job
        closed, self.lost = self.lost, True
        # Surviving children would hold its pipes and use processor time.
        self._kill()
        code = await self._ended()
        if code == STREAMS_LOST:
            how = f"{self.writer} closed the descriptors that messages travel through"
        _, running = self.beat()
        detail = self._hung or how or f"the {self.name} ended with status {code}"
        for number, future in self._calls.items():
            if not future.done():
                future.set_exception(self.loss(number, guilty or running, detail))
        if not closed:
            self.freed(self)

    async def _ended(self) -> int:
        """The exit status, once the process has ended."""
        assert self._process is not None
        try:
            async with asyncio.timeout(KILL_S):
                return await self._process.wait()
        except TimeoutError:
            # The user's code may have stopped the guard.
            self._process.kill()
            return await self._process.wait()

    def _kill(self) -> None:
        """Has the guard kill the process with all that the user's code started in it."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1


async def _copy_output(stream: asyncio.StreamReader, writer: str) -> None:
    left, began = OUTPUT_BYTES, time.monotonic()
    # More than the pipe gives at once: the stream's own limit is that of a message.
    while data := await stream.read(1 << 20):
        if time.monotonic() - began >= OUTPUT_WINDOW_S:
            left, began = OUTPUT_BYTES, time.monotonic()
        if left >= 0:
            sys.stderr.write(data[:left].decode(errors="replace"))
            sys.stderr.flush()
            if len(data) > left:
                event(logger, "output left out for a minute", logging.WARNING, of=writer)
        left -= len(data)


P = TypeVar("P", bound=UserProcess)


class UserProcessPool(Generic[P]):
    """``new(freed)`` makes a process. One that is lost is replaced at once."""

    def __init__(self, new: Callable[[Callable[[P], None]], P], count: int) -> None:
        self._new = new
        self.processes = [self.new() for _ in range(count)]
        self._room = asyncio.Event()  # Set when a process may have room for another call
        self._closing = False
        self._restarts: set[asyncio.Task[None]] = set()

    def new(self) -> P:
        """A process that is not started yet, and not in the pool."""
        return self._new(self._freed)

    async def start(self) -> None:
        """Raises the refusal of a process, once all of them have ended."""
        starts = (process.start() for process in self.processes)
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                await self.close()
                raise result

    async def with_room(self, depth: float) -> P:
        """The process with the fewest calls, once one has less than ``depth``."""
        while not (able := [p for p in self.processes if p.jobs < depth and not p.lost]):
            self._room.clear()
            await self._room.wait()
        return min(able, key=lambda process: process.jobs)

    async def close(self) -> None:
        async def close() -> None:
            self._closing = True
            for task in self._restarts:
                task.cancel()
            await asyncio.gather(*self._restarts, return_exceptions=True)
            await asyncio.gather(*(process.close() for process in self.processes))

        # Shielded: a process of the user's code must not outlive a worker that is cancelled.
        await asyncio.shield(close())

    def _freed(self, process: P) -> None:
        if process.lost and process in self.processes and not self._closing:
            event(logger, f"{process.name} lost, starting another", logging.WARNING)
            fresh = self.new()
            self.processes[self.processes.index(process)] = fresh
            task = asyncio.create_task(self._restart(process, fresh))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)
        self._room.set()

    async def _restart(self, old: P, fresh: P) -> None:
        await old.close()
        while True:
            try:
                await fresh.start()
                break
            except (fresh.refusal, OSError) as error:
                # The import succeeded before; perhaps the machine is out of memory. Calls wait.
                event(logger, f"{old.name} does not start", logging.ERROR, error=error)
                await asyncio.sleep(RESTART_S)
        self._room.set()
