"""A process that runs code of users for a worker, from inside. A message is a line of JSON.

    worker ──► guard ──► process
                │           │ first line in: what to load; first line out: what it has loaded
                │           │ messages of the worker ──► serve; send ──► messages to the worker
                │           └ time of the newest heartbeat, and the job that runs, in shared memory
                └ kills the process and all that it has started once either side ends

The process writes the start and the job of each call of the user into shared memory. So the worker
can tell a hanging call from a busy process, and knows the call's job, at no cost per call.
"""

import asyncio
import ctypes
import json
import mmap
import operator
import os
import resource
import select
import signal
import struct
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

from paceline.process.lifetime import die_with
from paceline.process.threads import end_forks_of

_PR_SET_CHILD_SUBREAPER = 36
_AGAIN_S = 0.05


def guard(life_fd: int) -> None:
    """Forks. Returns in the process of the user's code; the guard itself stays in here and ends
    with its status. ``life_fd``: read end of a pipe; the worker holds the write end until the
    processes are to end."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ended_read, ended_write = os.pipe()
    running = os.fork()
    if running == 0:
        # The kernel closes the other end with this process: the guard sees it at once.
        os.close(ended_read)
        os.close(life_fd)
        return
    os.close(ended_write)
    try:
        # Otherwise the worker would not see the end of the process's output.
        os.closerange(0, 3)
        ends = select.poll()  # select() takes no descriptor beyond 1023
        for fd in (life_fd, ended_read):
            ends.register(fd, select.POLLIN)
        ends.poll()
    finally:
        status = os.waitstatus_to_exitcode(_kill_all(running))
        # As the process ended, which the worker reports.
        if status < 0:
            if -status != signal.SIGKILL:
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(abs(status))


def _kill_all(running: int) -> int:
    """Kills and reaps all descendants. Returns the wait status of ``running``."""
    import psutil

    status = 0
    while True:
        # One that has ended meanwhile is seen by the next round.
        with suppress(psutil.Error):
            for process in psutil.Process().children(recursive=True):
                process.kill()
        try:
            pid, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == running:
            status = found
        if pid == 0:
            # A killed process needs a moment to end; those that it leaves come to this one.
            select.select([], [], [], _AGAIN_S)


BEAT = struct.Struct("<dQ")
"""Time of the newest heartbeat (monotonic, seconds), and the job whose call is running; 0: none."""
MOST_MESSAGE = 1 << 28  # Bytes of a line
_BEAT_S = 0.1
STREAMS_LOST = 77
"""Exit status of a process whose streams of messages the user's code has closed."""


class BadMessage(Exception):
    """The stream between worker and process is broken: the user's code wrote into it. ``job``: the
    call that did; 0: not known."""

    def __init__(self, detail: str, job: int = 0) -> None:
        super().__init__(detail)
        self.job = job


class Child(ABC):
    """Base of every such process. ``given``: the worker's first line."""

    def __init__(self) -> None:
        """Becomes the process of the command line MODULE BEAT_FD LIFE_FD. Exits if the worker has
        ended."""
        # Ctrl-C reaches the whole process group, but the worker decides when to end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        beat_fd, life_fd = map(int, sys.argv[1:])
        guard(life_fd)
        die_with(os.getppid())
        # Nothing follows the first line before it is answered, so that the buffer holds no job.
        if not (line := sys.stdin.buffer.readline()):
            sys.exit(1)
        self.given: dict[str, Any] = json.loads(line)
        self._out, self._in = _private_streams()
        self._shared = mmap.mmap(beat_fd, BEAT.size)
        os.close(beat_fd)
        if most := self.given.get("memory_mb"):
            # A lower limit of the machine's own stays.
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            limit = most << 20 if hard == resource.RLIM_INFINITY else min(hard, most << 20)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        self._files: list[tuple[int, int]] = []
        self._pid = os.getpid()
        self._serving: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def serve(self, message: dict[str, Any]) -> None:
        """Answers a message of the worker. Calls of several messages run at once."""

    def send(self, message: dict[str, Any]) -> None:
        left = memoryview(json.dumps(message, default=_number).encode() + b"\n")
        while left:
            left = left[self._out.write(left) :]

    def mark(self, job: int) -> None:
        """``job``: whose call runs from now on; 0: none. Ends this process if it is a fork that the
        user made and returned from, or if the streams are closed: nobody would ever get an
        answer."""
        if os.getpid() != self._pid:
            os._exit(1)
        try:
            whole = list(map(_file_of, (self._out, self._in))) == self._files
        except OSError:
            whole = False
        if not whole:
            os._exit(STREAMS_LOST)
        BEAT.pack_into(self._shared, 0, time.monotonic(), job)

    async def run(self, hello: dict[str, Any]) -> None:
        """Says what it has loaded, and serves until the worker closes the stream."""
        self.send(hello)
        self._files = list(map(_file_of, (self._out, self._in)))
        reader = asyncio.StreamReader(MOST_MESSAGE)
        loop = asyncio.get_running_loop()
        end_forks_of(loop)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._in)
        beating = asyncio.create_task(self._beat_always())
        try:
            while (message := await read_message(reader)) is not None:
                task = asyncio.create_task(self.serve(message))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)
        finally:
            beating.cancel()

    async def _beat_always(self) -> None:
        while True:
            self.mark(0)
            await asyncio.sleep(_BEAT_S)


def _number(value: Any) -> float:
    """A number of another library, such as numpy's, as JSON takes it. Raises TypeError, or
    ValueError."""
    try:
        return operator.index(value)
    except TypeError:
        return float(value)


def _file_of(stream: Any) -> tuple[int, int]:
    """The file behind a descriptor. It is another one after the user has closed the descriptor and
    opened a file of its own. Raises OSError if it is closed."""
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino


def _private_streams() -> tuple[Any, Any]:
    """Streams of messages, out and in, which no process that the user's code starts inherits. What
    it prints goes to standard error, and it finds nothing on standard input."""
    out, jobs = (os.fdopen(os.dup(fd), mode, buffering=0) for fd, mode in ((1, "wb"), (0, "rb")))
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return out, jobs


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The JSON object of the next line; None at the end of the stream. Raises BadMessage."""
    try:
        # Text of the user may have no line end: it must not fill the memory first.
        line = await reader.read(1)
        if line not in (b"", b"{"):
            raise BadMessage("no object")
        line += await reader.readline()
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
    except ConnectionError:
        return None
    except (ValueError, RecursionError) as error:
        raise BadMessage(str(error)) from None
    return message
