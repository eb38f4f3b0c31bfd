"""An engine without a model: a function makes the completions, the test says when they are
ready."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import (
    Aborted,
    Completion,
    Engine,
    EngineError,
    EngineStats,
    Finish,
    ParametersDiffer,
    Request,
)

MakeCompletion = Callable[[Request], Completion]


def scripted(*tokens: int) -> MakeCompletion:
    """Every completion is these tokens."""

    def make(request: Request) -> Completion:
        logprobs = np.full(len(tokens), -0.5, np.float32)
        return Completion(np.array(tokens, np.int32), logprobs, (), Finish.STOP)

    return make


def speaking(speaker: Callable[[str], str], tokenizer: PromptTokenizer) -> MakeCompletion:
    """The prompt's text, special tokens included, to the text of the completion.

    It ends with the end-of-sequence token unless max_tokens or a stop string cuts it first. Its
    token i has the log-probability -(i + 1) / 100.
    """

    def make(request: Request) -> Completion:
        text = speaker(tokenizer.decode_all(request.prompt_tokens.tolist()))
        finish, stop = Finish.STOP, None
        found = [(text.find(s) + len(s), s) for s in request.params.stop if s in text]
        if found:
            at, stop = min(found)
            tokens = tokenizer.encode(text[:at])
        else:
            tokens = [*tokenizer.encode(text), *tokenizer.end_tokens]
        if len(tokens) > request.params.max_tokens:
            tokens, finish, stop = tokens[: request.params.max_tokens], Finish.LENGTH, None
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 100
        return Completion(np.array(tokens, np.int32), logprobs, (), finish, stop)

    return make


class FakeEngine(Engine):
    """Between ``hold`` and ``release`` requests wait; ``finish`` lets one go on. Requests are named
    as the engine gets them, without the ending "/1" of a task's first attempt."""

    def __init__(
        self,
        make: MakeCompletion | None = None,
        *,
        context: int = 88,
        vocabulary: int = 1000,
        held: bool = False,
    ) -> None:
        self.make = make or scripted(4, 5, 2)
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.loads: list[int] = []
        self.load_error: Exception | None = None
        """The next load raises it."""
        self.load_gate = asyncio.Event()
        """Loads wait until it is set."""
        self.load_gate.set()
        self.on_answer: Callable[[Request], None] = lambda request: None
        self.max_context = context
        self.vocabulary = vocabulary
        self._held = held
        self._failure: asyncio.Future[None] | None = None
        self._running: dict[str, asyncio.Future[None]] = {}
        self._version = -1

    # ---- for the test

    @property
    def running(self) -> set[str]:
        return {request_id.removesuffix("/1") for request_id in self._running}

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        for ready in self._running.values():
            if not ready.done():
                ready.set_result(None)

    def finish(self, task_id: str) -> None:
        self._running[f"{task_id}/1"].set_result(None)

    def spoil(self, task_id: str, error: Exception) -> None:
        """The task's generation fails with ``error``."""
        self._running[f"{task_id}/1"].set_exception(error)

    def fail(self, error: Exception) -> None:
        """The engine dies by itself."""
        assert self._failure is not None
        self._failure.set_exception(error)

    def abort_all(self) -> None:
        for request_id in list(self._running):
            self.abort(request_id)

    # ---- Engine

    async def until_failure(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        await self._failure

    async def start(self) -> None: ...

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        self.check(request)
        name = request.request_id
        if name in self._running:
            raise EngineError(f"request {name} is already running")
        self.requests.append(request)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running[name] = ready
        try:
            # No engine answers within the same turn of the event loop.
            await (ready if self._held else asyncio.sleep(0))
        except asyncio.CancelledError:
            if not ready.done() or ready.cancelled():
                self.aborted.append(name.removesuffix("/1"))
            raise
        finally:
            del self._running[name]
        self.on_answer(request)
        return tuple(self._tagged(self.make(request)) for _ in range(request.count))

    def _tagged(self, completion: Completion) -> Completion:
        return replace(completion, versions=((self._version, len(completion.tokens)),))

    def abort(self, request_id: str) -> None:
        ready = self._running.get(request_id)
        if ready is not None and not ready.done():
            self.aborted.append(request_id.removesuffix("/1"))
            ready.set_exception(Aborted(request_id))
            # Its caller may have been cancelled as well.
            ready.exception()

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        if self.load_error is not None:
            if isinstance(self.load_error, ParametersDiffer):
                self._version = -1
            raise self.load_error
        self.loads.append(version)
        await self.load_gate.wait()
        self._version = version
        return 0.0

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._running))

    async def close(self) -> None: ...
