"""The engine interface: token ids in, token ids out.

    submit ──► waiting ──► running (continuous batch) ──► finished completions
                              ▲
        load_weights ─────────┘  swapped between two tokens; requests are kept

Guarantees of every engine:

* Tokens are never detokenised and tokenised again.
* A token carries the log-probability it had under the distribution it was sampled from
  (temperature, top-k and top-p applied, renormalised), in float32, and the weight version that
  produced it. Greedy tokens carry the log-probability of the untempered, unfiltered distribution.
* The completions of a request share one prefill of the prompt.
* New weights take effect between two tokens; running requests go on. All of a swap or none of it.
* The key-value cache that older weights wrote is kept (rollout.on_update = "keep"): later tokens of
  a running request attend to it. This is usual in asynchronous training; its effect is part of the
  measured log-prob gap.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import BadInput
from paceline.payloads.routes import Routes


class EngineError(BadInput):
    """The engine cannot be built or cannot do what was asked."""


class EngineDied(EngineError):
    """The engine was ended from outside; nothing is wrong with its input."""

    exit_status = 1


class WeightMismatch(EngineError):
    """Staged weights do not fit the model; nothing was loaded."""


class SwapFailed(EngineError):
    """These weights were not loaded. The engine serves the old ones; another try may succeed."""


class ParametersDiffer(EngineError):
    """After a swap, parameters differ from the weights that were loaded. Until weights are loaded
    again the engine generates nothing and its version is -1. Requests wait or are aborted."""

    @classmethod
    def of(cls, version: int, names: Sequence[str]) -> ParametersDiffer:
        return cls(f"after the swap to version {version} the parameters differ in {some(names)}")


class GenerationFailed(EngineError):
    """One request cannot be finished (e.g. non-finite logits); the engine goes on."""


class Aborted(Exception):
    """The request was aborted. ``partial``: its completions so far, for continuation."""

    def __init__(self, request_id: str, partial: tuple[Completion | None, ...] = ()) -> None:
        super().__init__(request_id)
        self.partial = partial


class Finish(StrEnum):
    STOP = "stop"  # End-of-sequence token (the last of the tokens) or a stop string
    LENGTH = "length"
    PARTIAL = "partial"  # Not finished: the request was aborted


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. ``seed`` and the completion's index determine its random numbers."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    stop: tuple[str, ...] = ()
    seed: int = 0  # Unsigned, 64 bits
    greedy: bool = False


Spans = tuple[tuple[int, int], ...]  # (weight version, number of tokens), in order


def merge_spans(spans: Iterable[tuple[int, int]]) -> Spans:
    """Joins neighbours of one version and leaves out empty spans."""
    merged: list[tuple[int, int]] = []
    for version, length in spans:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + length)
        elif length:
            merged.append((version, length))
    return tuple(merged)


def first_spans(spans: Iterable[tuple[int, int]], count: int) -> Spans:
    """The spans of the first ``count`` tokens."""
    first = []
    for version, length in spans:
        first.append((version, min(length, count)))
        count -= first[-1][1]
    return merge_spans(first)


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion, prompt excluded. ``tokens`` int32 [n], n >= 1; ``logprobs`` float32 [n];
    ``versions``: (version, length) spans that cover the tokens in order; ``stop``: the stop string
    that ended it, which its text still contains; ``routes`` [n, W] and ``prompt_routes`` [P, W]:
    experts of the tokens as inputs, if they are asked for."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: Spans
    finish: Finish
    stop: str | None = None
    routes: Routes | None = None
    prompt_routes: Routes | None = None


def token_count(completion: Completion | None) -> int:
    """None: no token yet."""
    return 0 if completion is None else len(completion.tokens)


@dataclass(frozen=True, slots=True)
class Request:
    """``count`` completions of one prompt. ``prefixes``: empty, or the tokens of each completion
    that another worker has generated (None: no token). The completion is continued after its
    prefix, which counts towards ``max_tokens`` and is part of the result. With
    ``exact_continuation`` it gets the random numbers of an uninterrupted one."""

    request_id: str
    prompt_tokens: NDArray[np.int32]
    params: SamplingParams
    count: int = 1
    prefixes: tuple[Completion | None, ...] = ()

    def prefix(self, index: int) -> Completion | None:
        return self.prefixes[index] if self.prefixes else None


OnPartial = Callable[[Request, "tuple[Completion | None, ...]"], None]
"""A request and its completions so far, finished or not; None: no token yet."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start; rates are differences of two readings."""

    tokens: int = 0
    samples: int = 0
    running: int = 0  # Sequences in the batch now
    waiting: int = 0  # Sequences not yet in it
    idle_s: float = 0.0  # Time without any sequence to work on. Seconds.
    swap_s: float = 0.0  # Time that generation was paused for weight swaps. Seconds.
    swaps: int = 0
    stage_s: float = 0.0  # Time that the newest weights were staged beside the engine. Seconds.


def some(names: Sequence[str]) -> str:
    """The first name, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def bad_stop(stops: Iterable[Any]) -> Any | None:
    """The first stop string that is no text, empty, or has a lone surrogate; else None."""
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            return stop if stop is not None else "None"
        try:
            stop.encode()
        except UnicodeEncodeError:
            return stop
    return None


class Engine(ABC):
    """One model on one device (or one group of devices). Methods are called from one event loop."""

    exact_continuation: ClassVar[bool] = True
    """A sampled completion that another worker continues equals the uninterrupted one. Greedy
    completions do so on every engine."""

    least_temperature: ClassVar[float] = 0.0
    """Lower temperatures are refused: the engine would silently raise them. 0 is greedy."""

    most_temperature: ClassVar[float] = math.inf  # Higher temperatures are refused

    vocabulary: int  # Token ids are below this. Known once the engine has started.

    max_context: int
    """Longest prompt plus completion, in tokens. Known once the engine has started."""

    completion_finished: Callable[[str], None] = staticmethod(lambda request_id: None)
    """Set by the engine's user. Called in the event loop with a request's id for each of its
    completions that finishes, at once, however long the others take."""

    @abstractmethod
    async def start(self) -> None:
        """Loads the model. Raises EngineError."""

    @abstractmethod
    async def generate(self, request: Request) -> tuple[Completion, ...]:
        """The request's completions, in order, once all are finished. Raises Aborted after
        ``abort``, GenerationFailed if the model's output is unusable or ``check`` refuses the
        request, and EngineError if the engine is closed."""

    def check(self, request: Request) -> None:
        """Raises GenerationFailed for invalid model input. On the device or in another process it
        would make the whole engine fail."""
        params = request.params
        needed = len(request.prompt_tokens) + params.max_tokens
        if needed > self.max_context:
            raise GenerationFailed(
                f"prompt plus max_tokens is {needed} tokens, the engine's context "
                f"{self.max_context}"
            )
        prefixes = [prefix.tokens for prefix in request.prefixes if prefix is not None]
        for tokens in (request.prompt_tokens, *prefixes):
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
                raise GenerationFailed(
                    f"a token id is not in the model's vocabulary of {self.vocabulary}"
                )
        if (bad := bad_stop(params.stop)) is not None:
            raise GenerationFailed(f"{bad!r} cannot be a stop string")
        if not math.isfinite(params.temperature) or params.top_k >= 2**31:
            raise GenerationFailed("temperature or top_k is out of range")
        least, most = self.least_temperature, self.most_temperature
        if not (params.greedy or least <= params.temperature <= most):
            raise GenerationFailed(
                f"temperature is {params.temperature:g}; the engine samples at {least:g} to "
                f"{most:g}"
            )

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Ends a request at the next token boundary. Unknown ids are ignored."""

    def watch(self, every: int, report: OnPartial) -> None:  # noqa: B027
        """From now on calls ``report``, in the event loop, whenever a completion of a request has
        ``every`` (at least 1) tokens more than at the request's last report, or than its prefix. An
        engine that cannot inspect running requests reports nothing."""

    @abstractmethod
    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Swaps to ``version`` at the next token boundary; returns the pause in seconds.
        ``tensors``: by Hugging Face name, on any device, tied weights once or under every name;
        with model.lora the adapters alone, which belong to the base at model.path.
        They must not change until this returns. Raises WeightMismatch for unknown or missing names,
        wrong shapes, or tied weights that differ; SwapFailed if another try with the same weights
        may succeed. In both cases nothing is loaded. Raises ParametersDiffer if parameters differ
        from ``tensors`` afterwards: no token is generated with them. A version that is not newer
        than the served one replaces weights that were never committed. The caller aborts running
        requests first: their tokens are tagged with that version."""

    async def park(self) -> None:
        """Gives up the device's memory, weights and cache, when no request runs (the caller has
        aborted them); ``version`` is -1 then. Raises EngineError. An engine that cannot do so
        cannot take turns with a trainer."""
        raise EngineError(f"{type(self).__name__} cannot give up its device: it has no park()")

    async def unpark(self) -> None:
        """Takes the memory again. The next load_weights fills it; until then no request may come.
        Raises EngineError."""
        raise EngineError(f"{type(self).__name__} cannot take its device again: it has no unpark()")

    async def until_failure(self) -> None:
        """Raises EngineError once the engine has died by itself; never returns. For a worker whose
        engine is idle. An engine that can fail only during a call raises there, and this waits for
        ever."""
        await asyncio.Event().wait()

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights that produce the next token; -1 before the first load."""

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    async def close(self) -> None:
        """Aborts what runs and frees the device. Idempotent."""
