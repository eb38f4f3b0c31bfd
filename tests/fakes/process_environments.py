"""Environments for processes of their own: each prompt names what one does there."""

import asyncio
import inspect
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rollout_worker.environments.base import (
    BadTurn,
    EnvironmentTask,
    Sample,
    SetupFailed,
    TranscriptOver,
    TurnRewards,
)

_left: asyncio.Queue[Any] = asyncio.Queue()
"""Tasks that an environment has left behind, for another one in its process."""


async def by_prompt(task: EnvironmentTask, sample: Sample) -> Any:
    turn = await sample(task.prompt)
    match task.prompt:
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "block":
            _block()
        case "allocate":
            return len(bytearray(4 << 30))
        case "no sandbox":
            raise SetupFailed("no sandbox")
        case "cancel everybody":
            for each in asyncio.all_tasks():
                each.cancel()
            await asyncio.sleep(0)
        case "wait":
            await asyncio.sleep(3600)
        case "exit in a task":
            await asyncio.gather(_ends())
        case "write":
            _write(b"garbage\n")
            _block()
        case "write as the second":
            _write(b'{"id": 2, "call": ""}\n')
            await asyncio.sleep(3600)
        case "no reward":
            return {1.0}
        case "unscored":
            return None
        case "no encoding":
            return {"\ud83d": 2.0}
        case "in a thread":
            return await asyncio.to_thread(lambda: 1.0)
        case "hang in a thread":
            await asyncio.to_thread(_block)
        case "go on although cancelled":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(0.5)
                _mark(task)
                _block()
        case "fails as 0" | "fails as 1" if task.prompt.endswith(str(task.index)):
            await _left.get()
            raise ValueError("one of two")
        case "fails as 0" | "fails as 1":
            try:
                await _left.put("the other one waits now")
                await asyncio.Event().wait()
            finally:
                _mark(task)
        case "fill":
            while True:
                await sample("more")
        case "two at once":
            try:
                await asyncio.gather(sample("a"), sample("b"))
            except BadTurn as bad:
                return float("one turn at a time" in str(bad))
        case "leave tasks" if task.index == 0:
            ended = asyncio.create_task(sample.branch()("a"))
            await asyncio.sleep(0)
            ended.cancel()
            pending = [asyncio.create_task(_asks_on(each)) for each in (sample, sample.branch())]
            await _left.put([ended, *pending])
        case "leave tasks":
            ended, *pending = left = await _left.get()
            await asyncio.wait(left)
            return float(all(isinstance(each.exception(), TranscriptOver) for each in pending))
        case "end what is left" if task.index == 0:
            left = asyncio.create_task(asyncio.sleep(3600))
            await _left.put([asyncio.current_task(), left])
        case "end what is left":
            owner, left = await _left.get()
            await asyncio.wait([owner])
            left.cancel()
            await asyncio.wait([left])
        case "look at itself":
            itself: Any = asyncio.current_task()
            return float(inspect.getcoroutinestate(itself.get_coro()) == inspect.CORO_RUNNING)
        case "play":
            again = await sample(np.array(turn.tokens[:3]), stop="z")
            assert (again.versions, type(again.tokens)) == (((3, len(again.tokens)),), tuple)
            return TurnRewards([np.float32(0.5), 1], {"turns made": 2, "left": turn.room > 0})
    return 1.0


class FunctionTimedOut(BaseException):
    """As func_timeout's."""


RETURNED: dict[str, Any] = {
    "nan": float("nan"),
    "infinity": {"a": float("inf")},
    "text": "7",
    "nothing by name": {},
    "list": [1.0],
}
RAISED = {
    "error": KeyError("no such door"),
    "exit": SystemExit(3),
    "library": FunctionTimedOut("1.5 s"),
    "generator": GeneratorExit(),
    "cancelled": asyncio.CancelledError(),
    "own limit": TimeoutError("the shop is closed"),
}
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "no role": ([{"no": "role"}], {}),
    "large token": ([5, 6, 999_999], {}),
    "negative token": ([5, -1], {}),
    "huge token": ([1 << 40], {}),
    "letters": (["a", 5], {}),
    "empty stop": ("go on", {"stop": ""}),
    "an empty stop": ("go on", {"stop": ("x", "")}),
    "number to stop": ("go on", {"stop": (7,)}),
    "nothing to stop": ("go on", {"stop": [None]}),
    "half a letter": ("go on", {"stop": "\ud800"}),
    "half a token": ("go on", {"max_tokens": 2.5}),
}


async def fails(task: EnvironmentTask, sample: Sample) -> Any:
    """Each prompt names a way to fail."""
    match name := task.prompt:
        case "no turn":
            return 1.0
        case "fork":
            os.fork()
            await sample(task.prompt)
            raise ValueError("in one process")
    await sample(task.prompt)
    if name == "one sample":
        return 1.0 if task.index else None
    if name == "exit of a task":
        await asyncio.gather(_leaves())
    if name == "stop of the loop":
        asyncio.get_running_loop().stop()
    if name in RAISED:
        raise RAISED[str(name)]
    if name in ASKED:
        said, how = ASKED[str(name)]
        await sample(said, **how)
    return RETURNED.get(str(name), 0.0)


async def _leaves() -> None:
    raise SystemExit(0)


async def branches(task: EnvironmentTask, sample: Sample) -> TurnRewards:
    """Goes on in two ways after its first turn, and beside them from a summary."""
    first = await sample(task.prompt)
    kept = sample.branch(after=first)
    fresh, unused = sample.branch(), sample.branch()
    turns = [first, await sample("?"), *await asyncio.gather(kept("!"), fresh("summary: b"))]
    turns += [await fresh("."), await sample("..")]
    assert [turn.number for turn in turns] == [*range(6)]
    nowhere = sample.branch(after=replace(first, number=9))
    for branch, said in ((unused, ""), (nowhere, "?")):
        try:
            await branch(said)
        except BadTurn:
            continue
        return TurnRewards([])
    return TurnRewards([turn.number / 8 for turn in turns])


def _mark(task: EnvironmentTask) -> None:
    Path(task.row["mark"]).touch()


def _write(line: bytes) -> None:
    for fd in range(3, 64):
        try:
            os.write(fd, line)
        except OSError:
            pass


def _block() -> None:
    time.sleep(60)


async def _asks_on(sample: Sample) -> None:
    while True:
        await sample("more")


async def _ends() -> None:
    os._exit(4)
