"""Scoring process of the pool: jobs in, scores out, as lines of JSON over pipes.

    python -m rollout_worker.rewards.child TIMEOUT_S BEAT_FD LIFE_FD

The first line names the reward functions. The process writes the start and the job of each call
into shared memory. So its parent can tell a hanging call from a busy process, and knows the call's
job, at no cost per call.
"""

import asyncio
import ctypes
import json
import mmap
import os
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import one_line
from paceline.process.lifetime import die_with
from paceline.process.threads import end_forks_of
from rollout_worker.rewards.functions import Job, Reward, RewardError, ScoringFailed, load, score

_PR_SET_CHILD_SUBREAPER = 36
_AGAIN_S = 0.05


def guard(life_fd: int) -> None:
    """Forks. Returns in the scoring process; the guard itself stays in here and ends with its
    status. ``life_fd``: read end of a pipe; the worker holds the write end until the processes are
    to end."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ended_read, ended_write = os.pipe()
    scoring = os.fork()
    if scoring == 0:
        # The kernel closes the other end with this process: the guard sees it at once.
        os.close(ended_read)
        os.close(life_fd)
        return
    os.close(ended_write)
    try:
        # Otherwise the worker would not see the end of the scoring process's output.
        os.closerange(0, 3)
        select.select([life_fd, ended_read], [], [])
    finally:
        status = os.waitstatus_to_exitcode(_kill_all(scoring))
        # As the scoring process ended, which the worker reports.
        if status < 0:
            if -status != signal.SIGKILL:
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(abs(status))


def _kill_all(scoring: int) -> int:
    """Kills and reaps all descendants. Returns the wait status of the scoring process."""
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
        if pid == scoring:
            status = found
        if pid == 0:
            # A killed process needs a moment to end; those that it leaves come to this one.
            select.select([], [], [], _AGAIN_S)


BEAT = struct.Struct("<dQ")
"""Time of the newest heartbeat (monotonic, seconds), and the job whose call is running; 0: none."""
MOST_MESSAGE = 1 << 28  # Bytes of a line
_BEAT_S = 0.1
STREAMS_LOST = 77
"""Exit status of a scoring process whose streams of jobs and scores a reward has closed."""


class BadMessage(Exception):
    """The stream between worker and scoring process is broken: a reward wrote into it."""


def main() -> int:
    timeout_s, beat_fd = float(sys.argv[1]), int(sys.argv[2])
    # Ctrl-C reaches the whole process group, but the worker decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard(int(sys.argv[3]))
    die_with(os.getppid())
    # Nothing follows the first line before it is answered, so that the buffer holds no job.
    if not (line := sys.stdin.buffer.readline()):
        return 1  # the worker has ended
    streams = out, jobs = _private_streams()
    shared = mmap.mmap(beat_fd, BEAT.size)
    os.close(beat_fd)
    try:
        rewards = load(json.loads(line))
    except RewardError as error:
        _write(out, {"error": str(error)})
        return 2
    weights = [[reward.component, reward.weight] for reward in rewards]
    _write(out, {"ready": weights, "waits": all(reward.waits for reward in rewards)})
    files = [_file_of(stream) for stream in streams]
    asyncio.run(_Child(rewards, timeout_s, shared, out, jobs, files).run())
    return 0


def _file_of(stream: Any) -> tuple[int, int]:
    """The file behind a descriptor. It is another one after a reward has closed the descriptor and
    opened a file of its own. Raises OSError if it is closed."""
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino


def _private_streams() -> tuple[Any, Any]:
    """Streams of scores and of jobs, which no process that a reward starts inherits. What a reward
    prints goes to standard error, and it finds nothing on standard input."""
    out, jobs = (os.fdopen(os.dup(fd), mode, buffering=0) for fd, mode in ((1, "wb"), (0, "rb")))
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return out, jobs


@dataclass(slots=True)
class _Child:
    _rewards: list[Reward]
    _timeout_s: float
    _shared: mmap.mmap
    _out: Any
    _in: Any
    _files: list[tuple[int, int]]
    _pid: int = field(default_factory=os.getpid)
    _jobs: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        reader = asyncio.StreamReader(MOST_MESSAGE)
        loop = asyncio.get_running_loop()
        end_forks_of(loop)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._in)
        beating = asyncio.create_task(self._beat_always())
        try:
            while (message := await read_message(reader)) is not None:
                task = asyncio.create_task(self._serve(message))
                self._jobs.add(task)
                task.add_done_callback(self._jobs.discard)
        finally:
            beating.cancel()

    async def _serve(self, message: dict[str, Any]) -> None:
        started = time.monotonic()
        answer: dict[str, Any] = {"id": message["id"]}

        def calling(entered: bool) -> None:
            self._beat(message["id"] if entered else 0)

        try:
            job = Job(**message["job"])
            limit = job.timeout_s or self._timeout_s
            answer["scores"] = await score(self._rewards, job, timeout_s=limit, calling=calling)
        except ScoringFailed as failure:
            answer |= {"reason": failure.reason, "detail": str(failure)}
            answer |= {"trace": failure.trace, "number": failure.number}
        except BaseException as error:
            # A cancellation of the user's, or a value that breaks the check of it: the worker waits
            # for an answer to this job in any case.
            detail = f"the job cannot be scored: {one_line(error)}"
            answer |= {"reason": "reward_error", "detail": detail}
        answer["seconds"] = time.monotonic() - started
        calling(False)
        _write(self._out, answer)

    def _leave_if_broken(self) -> None:
        """Ends this process if it is a fork that a reward made and returned from, or if a reward
        has closed the streams of jobs and scores: nobody would ever get an answer."""
        if os.getpid() != self._pid:
            os._exit(1)
        try:
            whole = [_file_of(self._out), _file_of(self._in)] == self._files
        except OSError:
            whole = False
        if not whole:
            os._exit(STREAMS_LOST)

    def _beat(self, job: int) -> None:
        self._leave_if_broken()
        BEAT.pack_into(self._shared, 0, time.monotonic(), job)

    async def _beat_always(self) -> None:
        while True:
            self._beat(0)
            await asyncio.sleep(_BEAT_S)


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The JSON object of the next line; None at the end of the stream. Raises BadMessage."""
    try:
        # Text of a reward may have no line end: it must not fill the memory first.
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


def _write(out: Any, message: dict[str, Any]) -> None:
    left = memoryview(json.dumps(message).encode() + b"\n")
    while left:
        left = left[out.write(left) :]


if __name__ == "__main__":
    sys.exit(main())
