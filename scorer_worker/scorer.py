"""The scorer interface: completions in, a number for each or numbers for each token out."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.config.schema import Config
from paceline.errors import BadInput, one_line

T = TypeVar("T")
Tokens = NDArray[np.int32]
Score = float | NDArray[np.float32]
"""A number, or one for each token of the completion."""


class ScorerError(BadInput):
    """A scorer cannot be used. The message names the setting and the remedy."""


class BadCompletion(Exception):
    """The completion can never be scored. The message says why."""


class NoScore(Exception):
    """The model's answer is no score. The message says what it was."""


class Unavailable(Exception):
    """The server that the scorer asks does not answer. Another scorer, or a later request, may have
    more luck."""


@dataclass(frozen=True, slots=True)
class Item:
    """One completion, with its prompt."""

    prompt_tokens: Tokens
    tokens: Tokens
    prompt: str = ""
    text: str = ""
    answer: str = ""

    def __len__(self) -> int:
        return len(self.prompt_tokens) + len(self.tokens)


class CompletionScorer(ABC):
    """A pure function: equal items have equal scores, but for the sampling of a judge's reply."""

    done: int = 0
    """Rises with progress: batches, or replies of a judge."""
    computing: bool = False
    """A model of this process computes: without progress it hangs."""

    parked: bool = False
    """It has nothing on its device, which others use. Requests wait."""

    async def start(self) -> None:  # noqa: B027  (optional)
        """Loads the model. Raises ScorerError."""

    async def park(self) -> None:  # noqa: B027  (a judge has no device)
        """Gives the device up, between two batches. Raises RuntimeError if the host has no room."""

    async def unpark(self) -> None:  # noqa: B027
        """Takes it. Raises StillInUse."""

    @abstractmethod
    async def score(self, items: Sequence[Item]) -> list[Score]:
        """In the order of ``items``. Raises BadCompletion, NoScore or Unavailable."""

    async def close(self) -> None:  # noqa: B027  (optional)
        """Ends what ``start`` began."""


def make_scorer(config: Config, name: str) -> CompletionScorer:
    """Raises ScorerError. Imports only what the kind needs."""
    known = config.scorers.by_name
    if name not in known:
        raise ScorerError(
            f"--scorer {name}: the config has no section [scorers.{name}] "
            f"({', '.join(known) or 'none'})"
        )
    match known[name].kind:
        case "reward_model":
            from scorer_worker.model_scorers import RewardModelScorer

            return RewardModelScorer(config, name)
        case "logprobs":
            from scorer_worker.model_scorers import TokenLogprobs

            return TokenLogprobs(config, name)
        case "judge":
            from scorer_worker.url_judge import UrlJudge

            return UrlJudge(config, name)


Waiting = tuple[Item, "asyncio.Future[Score]"]


class BatchedScorer(CompletionScorer):
    """One thread loads the model and computes; the event loop goes on meanwhile. Oldest requests
    first."""

    limit: int
    """Longest prompt plus completion, in tokens. Set by ``load``."""
    rows: int

    def __init__(self, batch_size: int, *, parked: bool = False) -> None:
        """``parked``: its first turn at the device has yet to come."""
        self._batch_size, self.parked = batch_size, parked
        self.device_use = asyncio.Lock()
        """Held by a batch, or while it is parked."""
        self._queue: deque[Waiting] = deque()
        self._filled = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._work: asyncio.Task[None] | None = None

    @abstractmethod
    def load(self) -> None:
        """In the model's thread. Raises ScorerError."""

    @abstractmethod
    def compute(self, items: Sequence[Item]) -> list[Score]:
        """In the model's thread, at most ``batch_size`` items."""

    def in_thread(self, work: Callable[..., T], *given: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    async def start(self) -> None:
        await self.in_thread(self.load)
        if self.parked:
            await self.device_use.acquire()
        self._work = asyncio.create_task(self._compute_batches())

    async def score(self, items: Sequence[Item]) -> list[Score]:
        for item in items:
            if len(item) > self.limit:
                raise BadCompletion(
                    f"prompt and completion have {len(item)} tokens, and this scorer takes "
                    f"{self.limit}: set its max_context higher, or rollout.max_tokens lower"
                )
            if (highest := max(item.prompt_tokens.max(), item.tokens.max())) >= self.rows:
                raise BadCompletion(f"token {highest}: the scorer's model knows {self.rows}")
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in items]
        self._queue.extend(zip(items, futures, strict=True))
        self._filled.set()
        try:
            return list(await asyncio.gather(*futures))
        finally:
            # Nobody waits for the rest of a request that failed or was cancelled.
            for future in futures:
                future.cancel()

    async def _compute_batches(self) -> None:
        while True:
            batch: list[Waiting] = []
            while self._queue and len(batch) < self._batch_size:
                item, future = self._queue.popleft()
                if not future.done():
                    batch.append((item, future))
            if not batch:
                self._filled.clear()
                await self._filled.wait()
            elif not await self._compute(batch) and len(batch) > 1:
                # One of them is at fault: the others must not fail with it.
                for waiting in batch:
                    await self._compute([waiting])

    async def _compute(self, batch: list[Waiting]) -> bool:
        """False if several items together failed."""
        async with self.device_use:
            self.computing = True
            try:
                scores = await self.in_thread(self._computed, [item for item, _ in batch])
            except Exception as error:
                if len(batch) == 1 and not batch[0][1].done():
                    batch[0][1].set_exception(error)
                return False
            finally:
                self.computing = False
                self.done += 1
        for (_, future), score in zip(batch, scores, strict=True):
            if not future.done():
                future.set_result(score)
        return True

    def _computed(self, items: Sequence[Item]) -> list[Score]:
        try:
            return self.compute(items)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            # No future can hold it: code that comes with a model would end all later batches.
            raise RuntimeError(one_line(error)) from error

    async def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._work
        self._thread.shutdown(wait=False, cancel_futures=True)
