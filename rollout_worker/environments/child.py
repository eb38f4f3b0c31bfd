"""Environment process of the pool. See paceline.user_code.child.

    worker ── task ──► environment(task, sample) ── result, or why there is none ──► worker
    worker ◄── said ── sample(...) ◄── turn, or a refusal ── worker

A step of an environment, from one ``await`` to the next, is marked as its own. So the worker knows
whose step blocks the process, or has ended it.
"""

import asyncio
import itertools
import sys
from collections.abc import Container, Coroutine, Sequence
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

from paceline.process.threads import replace_executor
from paceline.user_code.child import Child
from rollout_worker.environments.base import (
    SETUP_ERROR,
    BadEnvironment,
    BadTurn,
    Endpoint,
    Environment,
    EnvironmentFailed,
    EnvironmentTask,
    Said,
    TranscriptFull,
    TranscriptOver,
    Turn,
    TurnRewards,
    load,
    play,
)

_OVER = {"detail": "the sample's environment has ended"}
_present: ContextVar[int] = ContextVar("environment", default=0)


class _Environments(Child):
    environment: Environment

    def __init__(self) -> None:
        super().__init__()
        self._playing: dict[int, asyncio.Task[Any]] = {}
        self._turns: dict[int, tuple[int, asyncio.Future[dict[str, Any]]]] = {}
        """By the number of the call: whose it is, and the answer to come."""
        self._numbers = itertools.count()
        self._tokenizer: Any = _Tokenizer(self.given["config"])

    def new_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_task_factory(self._new_task)
        return loop

    async def run(self, hello: dict[str, Any]) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.stop = _not_theirs
        try:
            await super().run(hello)
        finally:
            del loop.stop

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        number = _present.get()
        steps = _Steps(coro, partial(self.mark, number), self.mark) if number else coro
        return _OwnTask(self._playing, steps, loop=loop, **options)

    async def serve(self, message: dict[str, Any]) -> None:
        number = message["id"]
        if "task" in message:
            _present.set(number)  # each message is served by a task of its own
            self._playing[number] = asyncio.create_task(self._play(number, message["task"]))
        elif "call" in message:
            self._answer(message["call"], message)
        elif (playing := self._playing.get(number)) is not None:
            playing.cancel()
            # It may wait for a thread that never returns.
            replace_executor(asyncio.get_running_loop())

    async def _play(self, number: int, given: dict[str, Any]) -> None:
        if given["openai"] is not None:
            given["openai"] = Endpoint(**given["openai"])
        task = EnvironmentTask(**given, tokenizer=self._tokenizer)
        answer: dict[str, Any]
        try:
            result = await play(self.environment, task, partial(self._say, number))
            answer = {"result": result}
            if isinstance(result, TurnRewards):
                answer = {"result": result.outcome, "turns": list(result.turns)}
        except EnvironmentFailed as failed:
            setup = failed.reason == SETUP_ERROR
            answer = {"failed": str(failed), "trace": failed.trace}
            answer |= {"setup": setup, "full": failed.full}
        except asyncio.CancelledError:
            answer = {"failed": "it cancelled itself"}
        finally:
            del self._playing[number]
        # Tasks that it left behind get no turn any more.
        for call in [call for call, (player, _) in self._turns.items() if player == number]:
            self._answer(call, _OVER)
        try:
            self._tell(number, **answer)
        except (TypeError, ValueError, RecursionError):
            # The worker says what is wrong with it.
            self._tell(number, result=f"{type(answer['result']).__name__}")

    def _tell(self, number: int, **message: Any) -> None:
        self.mark(number)  # a fork ends here, before it says the same
        self.send({"id": number, **message})

    def _answer(self, call: int, answer: dict[str, Any]) -> None:
        _, turn = self._turns.get(call, (0, None))
        if turn is not None and not turn.done():
            turn.set_result(answer)

    async def _say(
        self,
        number: int,
        said: Said,
        branch: int,
        after: int | None,
        *,
        max_tokens: int | None,
        stop: Sequence[str],
    ) -> Turn:
        if number not in self._playing:
            raise TranscriptOver(_OVER["detail"])
        call = next(self._numbers)
        self._tell(
            number,
            call=call,
            said=said if isinstance(said, str) else list(said),
            branch=branch,
            after=after,
            max_tokens=max_tokens,
            stop=list(stop),
        )
        turn = asyncio.get_running_loop().create_future()
        self._turns[call] = number, turn
        try:
            answer = await turn
        except asyncio.CancelledError:
            if number in self._playing:
                self._tell(number, call=call)
            raise
        finally:
            del self._turns[call]
        match answer:
            case {"turn": made}:
                tuples = {name: tuple(made[name]) for name in ("tokens", "logprobs")}
                return Turn(**made | tuples | {"versions": tuple(map(tuple, made["versions"]))})
            case {"full": code, "detail": detail}:
                raise TranscriptFull(code, detail)
            case {"bad": detail}:
                raise BadTurn(detail)
        raise TranscriptOver(answer["detail"])


def _not_theirs() -> None:
    raise RuntimeError("all environments of the process share its event loop")


class _OwnTask(asyncio.Task[Any]):
    """A task that no other environment can cancel while its own plays: asyncio.all_tasks() has
    those of its neighbours, and of the process itself."""

    def __init__(self, playing: Container[int], *args: Any, **options: Any) -> None:
        self._of, self._playing = _present.get(), playing
        super().__init__(*args, **options)

    def cancel(self, msg: Any = None) -> bool:
        others = self._of == 0 or self._of in self._playing
        return False if others and _present.get() not in (0, self._of) else super().cancel(msg)


class _Steps(Coroutine[Any, Any, Any]):
    """``coro``, with ``begin`` called before each step and ``end(0)`` after it."""

    def __init__(self, coro: Any, begin: Any, end: Any) -> None:
        self._coro, self._begin, self._end = coro, begin, end

    def send(self, value: Any) -> Any:
        return self._step(self._coro.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coro.throw, *error)

    def close(self) -> None:
        self._coro.close()

    def __getattr__(self, name: str) -> Any:
        """Libraries look at a coroutine's own fields (anyio: ``cr_frame``)."""
        return getattr(self._coro, name)

    def __await__(self) -> Any:
        return self._coro.__await__()

    def _step(self, step: Any, *values: Any) -> Any:
        self._begin()
        try:
            return step(*values)
        except SystemExit as error:
            # It would end the process, and all environments in it.
            raise RuntimeError("a task of the environment raised SystemExit") from error
        finally:
            self._end(0)


class _Tokenizer:
    """Loaded when an environment first uses it: transformers takes seconds to import."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    @cached_property
    def _loaded(self) -> Any:
        from paceline.config.schema import Config
        from paceline.prompt_tokenizer import PromptTokenizer

        return PromptTokenizer(Config.model_validate(self._config))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)


def main() -> int:
    child = _Environments()
    try:
        child.environment = load(child.given["name"], child.given["options"])
    except BadEnvironment as error:
        child.send({"error": str(error)})
        return 2
    with asyncio.Runner(loop_factory=child.new_loop) as runner:
        runner.run(child.run({"ready": True}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
