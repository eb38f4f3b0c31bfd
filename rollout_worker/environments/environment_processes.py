"""Environments in processes, which may compute, hang or die without harm to the worker.

worker's loop                     environment process, the one with the fewest samples
run ── task ─────────────────────► environment(task, sample)
 ▲      conversation.say ◄──────── sample(...)       the clock stops while the model generates
 └── result, error, or timeout ◄──┘
        │ the process ended
        ├─ in a step of this environment, or nobody knows whose ──► environment_crashed
        └─ in a step of another one ──► environment_lost, not counted as an attempt
"""

import asyncio
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.errors import one_line
from paceline.user_code import python_module
from paceline.user_code.child import BadMessage
from paceline.user_code.process import START_S, UserProcess, UserProcessPool
from rollout_worker.environments.base import (
    CRASHED,
    ERROR,
    LOST,
    SETUP_ERROR,
    TIMEOUT,
    BadEnvironment,
    BadTurn,
    EnvironmentFailed,
    EnvironmentTask,
    TranscriptFull,
    Turn,
    TurnRewards,
)
from rollout_worker.environments.conversation import Conversation

_ANSWER_S = 1.0  # A process that does not answer for this long is blocked
_MOST_DETAIL = 2000
_TURN = [each.name for each in fields(Turn)]
_ELSEWHERE = """
import os, runpy, sys
module, paths = sys.argv[1:3]
del sys.argv[1:3]
sys.path += paths.split(os.pathsep)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Runs our module under another interpreter. Its packages come first, ours after them."""


class EnvironmentProcess(UserProcess):
    module = "rollout_worker.environments.child"
    name = "environment process"
    what = "rollout.environment"
    writer = "an environment"
    refusal = BadEnvironment

    def __init__(self, config: Config, freed: Callable[[Any], None]) -> None:
        super().__init__(freed)
        self._config = config
        self.played: dict[int, Conversation] = {}  # By the number of the call
        self._turns: dict[tuple[int, int], asyncio.Task[None]] = {}

    def first(self) -> dict[str, Any]:
        rollout = self._config.rollout
        named = {"name": rollout.environment, "options": rollout.environment_options}
        config = self._config.model_dump(mode="json")
        return {**named, "config": config, "memory_mb": rollout.environment_memory_mb}

    def command(self) -> tuple[str, ...]:
        python = self._config.rollout.environment_python
        if python is None:
            return python_module(self.module)
        paths = os.pathsep.join(path for path in sys.path if Path(path).is_dir())
        return (python, "-P", "-c", _ELSEWHERE, self.module, paths)

    def play(self, task: EnvironmentTask, conversation: Conversation) -> tuple[int, Any]:
        given = {each.name: getattr(task, each.name) for each in fields(task)}
        del given["tokenizer"]
        given["openai"] = None if task.openai is None else asdict(task.openai)
        number, answer = self.call({"task": given | {"row": dict(task.row)}})
        self.played[number] = conversation
        return number, answer

    def leave(self, number: int) -> None:
        """The result of this call is wanted no more, and none of its turns."""
        self.played.pop(number).close()
        if number in self._calls and not self.lost:
            self.send({"id": number})

    def answers(self, message: dict[str, Any]) -> bool:
        number, call = message["id"], message.get("call")
        if call is None:
            if not isinstance(message.get("turns", []), list):
                raise BadMessage("no answer to a task", number)
            return True
        if not isinstance(call, int) or not isinstance(message.get("stop", []), list):
            raise BadMessage("no turn that can be made", number)
        if "said" not in message:
            if (turn := self._turns.get((number, call))) is not None:
                turn.cancel()
        elif (conversation := self.played.get(number)) is not None:
            turn = asyncio.create_task(self._say(conversation, number, call, message))
            self._turns[number, call] = turn
            turn.add_done_callback(lambda _: self._turns.pop((number, call)))
        return False

    def loss(self, number: int, running: int, detail: str) -> EnvironmentFailed:
        if self._hung or running not in (0, number):
            return EnvironmentFailed(LOST, f"another environment in its process: {detail}")
        return EnvironmentFailed(CRASHED, detail)

    async def _say(
        self, conversation: Conversation, number: int, call: int, asked: dict[str, Any]
    ) -> None:
        answer: dict[str, Any]
        try:
            turn = await conversation.say(
                asked["said"],
                transcript=conversation.branch(asked.get("branch", 0), asked.get("after")),
                max_tokens=asked.get("max_tokens"),
                stop=asked.get("stop", []),
            )
            answer = {"turn": {name: getattr(turn, name) for name in _TURN}}
        except TranscriptFull as full:
            answer = {"full": full.code, "detail": str(full)}
        except BadTurn as bad:
            answer = {"bad": str(bad)}
        except TypeError as bad:
            answer = {"bad": f"it said what is no input: {one_line(bad)}"}
        except Exception as error:
            # The failure of the attempt is the conversation's.
            answer = {"detail": one_line(error)}
        if not self.lost:
            self.send({"id": number, "call": call, **answer})


@dataclass
class _OwnTime:
    """Runs the time limit while the environment runs, and stops it while the model generates."""

    limit: asyncio.Timeout
    left_s: float
    since: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def __call__(self, runs: bool) -> None:
        if self.limit.expired():
            return
        now = asyncio.get_running_loop().time()
        if runs:
            self.since = now
            self.limit.reschedule(now + self.left_s)
        else:
            self.left_s -= now - self.since
            self.limit.reschedule(None)


class EnvironmentProcesses:
    def __init__(self, config: Config) -> None:
        count = config.rollout.environment_processes
        self._pool = UserProcessPool(lambda freed: EnvironmentProcess(config, freed), count)

    async def start(self) -> None:
        """Imports the environment, in every process. Raises BadEnvironment."""
        await self._pool.start()

    async def run(self, task: EnvironmentTask, conversation: Conversation, timeout_s: float) -> Any:
        """The environment's result. Raises EnvironmentFailed, also if its time is over or its
        process was lost. Closes ``conversation``."""
        try:
            async with asyncio.timeout(START_S):
                process = await self._pool.with_room(math.inf)
        except TimeoutError:
            detail = f"no process for it has started within {START_S:g} s"
            raise EnvironmentFailed(SETUP_ERROR, detail) from None
        number, answer = process.play(task, conversation)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                conversation.own_clock = _OwnTime(limit, timeout_s)
                return _result(await asyncio.shield(answer))
        except TimeoutError:
            process.leave(number)
            raise await self._blame(process, number, answer, timeout_s) from None
        finally:
            if number in process.played:
                process.leave(number)
            answer.cancel()

    async def close(self) -> None:
        await self._pool.close()

    async def _blame(
        self,
        process: EnvironmentProcess,
        number: int,
        answer: asyncio.Future[dict[str, Any]],
        timeout_s: float,
    ) -> EnvironmentFailed:
        """The cause of a timeout: the environment itself, or another one that blocks the
        process."""
        too_late = f"it took longer than rollout.environment_timeout_s = {timeout_s:g} s"
        await asyncio.wait({answer}, timeout=_ANSWER_S)
        silent_s, running = process.beat()
        if answer.done() or silent_s < _ANSWER_S:
            lost = answer.exception() if answer.done() else None
            if isinstance(lost, EnvironmentFailed) and lost.reason == LOST:
                return lost
            return EnvironmentFailed(TIMEOUT, too_late)
        blocked = EnvironmentFailed(LOST, "another environment blocks the process")
        if running in process.played:
            return blocked  # the time limit of that one ends it
        await process.kill(f"a call of an environment took longer than {timeout_s:g} s")
        if running not in (0, number):
            return blocked  # by what is left of one that is over
        return EnvironmentFailed(TIMEOUT, f"{too_late}, in a call that does not await")


def _result(answer: dict[str, Any]) -> Any:
    if "result" in answer:
        value = answer["result"]
        return TurnRewards(answer["turns"], value) if "turns" in answer else value
    reason = SETUP_ERROR if answer.get("setup") else ERROR
    raise EnvironmentFailed(
        reason,
        str(answer.get("failed"))[:_MOST_DETAIL],
        trace=str(answer.get("trace") or ""),
        full=bool(answer.get("full")),
    )
