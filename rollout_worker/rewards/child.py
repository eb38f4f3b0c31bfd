"""Scoring process of the pool: jobs in, scores out, as length-prefixed JSON over pipes.

    python -m rollout_worker.rewards.child FUNCTIONS_JSON TIMEOUT_S BEAT_FD LIFE_FD

It writes the start and the job of each call into shared memory. So its parent can tell a hanging call
from a busy process, and knows the call's job, at no cost per call.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from paceline.process.parent_death_signal import die_with
from rollout_worker.rewards.functions import Reward, RewardError, load
from rollout_worker.rewards.score import Job, ScoringFailed, score

HEADER = struct.Struct("<I")
BEAT = struct.Struct("<dQ")
"""Time of the newest heartbeat (monotonic, seconds), and the job whose call is running; 0: none."""
_BEAT_S = 0.1


def main() -> int:
    functions, timeout_s, beat_fd = json.loads(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    die_with(os.getppid())
    # Ctrl-C reaches the whole process group, but the worker decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _guard_group(int(sys.argv[4]))
    # Printed output of a reward must not mix with the scores.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    shared = mmap.mmap(beat_fd, BEAT.size)
    try:
        rewards = load(functions)
    except RewardError as error:
        _write(out, {"error": str(error)})
        return 2
    weights = [[reward.component, reward.weight] for reward in rewards]
    _write(out, {"ready": weights, "waits": all(reward.waits for reward in rewards)})
    asyncio.run(_Child(rewards, timeout_s, shared, out).run())
    return 0


def _guard_group(life_fd: int) -> None:
    """Forks a guard that kills this process group, itself included, once the worker is gone. The
    parent-death signal covers only this process, not the processes that a reward starts.

    ``life_fd``: read end of a pipe; the worker holds the write end until it ends.
    """
    if os.fork():
        os.close(life_fd)
        return
    try:
        # Otherwise the worker would not see the end of the scoring process's output.
        os.closerange(0, life_fd)
        os.closerange(life_fd + 1, life_fd + 1024)
        os.read(life_fd, 1)
    finally:
        os.killpg(0, signal.SIGKILL)


@dataclass(slots=True)
class _Child:
    _rewards: list[Reward]
    _timeout_s: float
    _shared: mmap.mmap
    _out: Any
    _jobs: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
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
            answer["scores"] = await score(
                self._rewards, Job(**message["job"]), timeout_s=self._timeout_s, calling=calling
            )
        except ScoringFailed as failure:
            answer |= {"reason": failure.reason, "detail": str(failure)}
        except asyncio.CancelledError as error:
            # The worker waits for an answer to this job in any case.
            answer |= {"reason": "reward_error", "detail": f"scoring was cancelled: {error}"}
        answer["seconds"] = time.monotonic() - started
        self._beat(0)
        _write(self._out, answer)

    def _beat(self, job: int) -> None:
        BEAT.pack_into(self._shared, 0, time.monotonic(), job)

    async def _beat_always(self) -> None:
        while True:
            self._beat(0)
            await asyncio.sleep(_BEAT_S)


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next JSON object; None at the end of the stream."""
    try:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        message: dict[str, Any] = json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message


def encode_message(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def _write(out: Any, message: dict[str, Any]) -> None:
    left = memoryview(encode_message(message))
    while left:
        left = left[out.write(left) :]


if __name__ == "__main__":
    sys.exit(main())
