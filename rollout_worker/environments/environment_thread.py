"""The thread that environments run in, and the time limit of each.

    worker's loop                        environments' loop
    run ── task ──────────────────────► environment(task, sample)
     ▲      conversation.say ◄────────── sample(...)       the clock stops while the model generates
     └── result, error, or timeout ◄─────┘

An environment that blocks the thread (computes, sleeps, uses a blocking client) delays only the
other environments. After its time limit the thread is abandoned: the other environments in it are
lost without blame, and new ones get a new thread.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from paceline.process.structured_log import event
from paceline.process.threads import BackgroundLoop, end_forks_of, replace_executor
from rollout_worker.environments.base import (
    ERROR,
    LOST,
    TIMEOUT,
    Environment,
    EnvironmentFailed,
    EnvironmentTask,
    Said,
    Turn,
    play,
)
from rollout_worker.environments.conversation import Conversation

logger = logging.getLogger(__name__)

_ANSWER_S = 1.0  # A thread that does not answer for this long is blocked
_CLOSE_S = 1.0
_present: ContextVar[_Episode] = ContextVar("environment")


@dataclass(eq=False, slots=True)
class _Episode:
    thread: BackgroundLoop
    result: asyncio.Future[Any] = field(init=False)  # In the worker's loop
    lost: bool = False  # Its thread was abandoned because of another environment


class _OwnTime:
    """Runs the time limit while the environment runs, and stops it while the model generates."""

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit = limit
        self._left = seconds
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()

    def __call__(self, runs: bool) -> None:
        if self._limit.expired():
            return
        now = self._loop.time()
        if runs:
            self._since = now
            self._limit.reschedule(now + self._left)
        else:
            self._left -= now - self._since
            self._limit.reschedule(None)


async def in_own_time(
    result: asyncio.Future[Any], conversation: Conversation, timeout_s: float
) -> Any:
    """``result``. Raises TimeoutError once the environment has had ``timeout_s`` for itself."""
    async with asyncio.timeout(timeout_s) as limit:
        conversation.own_clock = _OwnTime(limit, timeout_s)
        return await result


def too_late(timeout_s: float) -> str:
    return f"it took longer than rollout.environment_timeout_s = {timeout_s:g} s"


class EnvironmentThread:
    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._episodes: set[_Episode] = set()
        self._owners: WeakKeyDictionary[asyncio.Task[Any], _Episode] = WeakKeyDictionary()
        """The environment that each task in the thread belongs to."""
        self._thread = self._start()

    async def run(self, task: EnvironmentTask, conversation: Conversation, timeout_s: float) -> Any:
        """The environment's result. Raises EnvironmentFailed, also if its time is over or its
        thread was lost. Closes ``conversation``."""
        worker = asyncio.get_running_loop()

        async def say(said: Said, branch: int, after: int | None, **how: Any) -> Turn:
            async def turn() -> Turn:
                return await conversation.say(
                    said, transcript=conversation.branch(branch, after), **how
                )

            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(turn(), worker))

        async def in_thread() -> Any:
            _present.set(episode)
            if (root := asyncio.current_task()) is not None:
                self._owners[root] = episode
            return await play(self._environment, task, say)

        episode = _Episode(self._thread)
        episode.result = asyncio.wrap_future(episode.thread.submit(in_thread()))
        self._episodes.add(episode)
        try:
            return await in_own_time(episode.result, conversation, timeout_s)
        except TimeoutError:
            # It may wait for a thread that never returns.
            replace_executor(episode.thread.loop)
            raise await self._blame(episode, timeout_s) from None
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if waiting is not None and waiting.cancelling():
                raise
            if episode.lost:
                raise EnvironmentFailed(LOST, "another environment blocked it") from None
            raise EnvironmentFailed(ERROR, "it cancelled itself") from None
        finally:
            conversation.close()
            episode.result.cancel()
            self._episodes.discard(episode)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.close, _CLOSE_S)

    def _start(self) -> BackgroundLoop:
        def new_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
            task = asyncio.Task(coro, loop=loop, **options)
            if (episode := _present.get(None)) is not None:
                self._owners[task] = episode
            return task

        thread = BackgroundLoop("environments")
        thread.loop.set_task_factory(new_task)
        end_forks_of(thread.loop)
        return thread

    async def _blame(self, episode: _Episode, timeout_s: float) -> EnvironmentFailed:
        """The cause of a timeout: the environment itself, or another one that blocks the thread."""
        if await self._answers(episode.thread):
            return EnvironmentFailed(TIMEOUT, too_late(timeout_s))
        busy = asyncio.current_task(episode.thread.loop)
        owner = episode if busy is None else self._owners.get(busy, episode)
        blocked = EnvironmentFailed(LOST, "another environment blocks the shared thread")
        if owner is not episode and owner in self._episodes:
            return blocked  # the time limit of that one ends it
        self._abandon(owner, episode.thread)
        if owner is not episode:
            return blocked  # by what is left of one that is over
        return EnvironmentFailed(TIMEOUT, f"{too_late(timeout_s)}, in a call that does not await")

    async def _answers(self, thread: BackgroundLoop) -> bool:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await asyncio.wrap_future(thread.submit(asyncio.sleep(0)))
        except (TimeoutError, RuntimeError):
            return False
        return True

    def _abandon(self, guilty: _Episode, thread: BackgroundLoop) -> None:
        if thread is not self._thread:
            return
        event(logger, "environment blocks its thread, starting a new one", logging.WARNING)
        self._thread = self._start()
        for episode in self._episodes:
            if episode.thread is thread and episode is not guilty:
                episode.lost = episode.result.cancel()
        # It ends once the call returns, and it does not delay the process's exit.
        thread.close(0)
