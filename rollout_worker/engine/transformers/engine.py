"""The small default engine: continuous batching over a transformers model, in one thread.

    event loop                      engine thread
    generate ── submit ──► inbox ──► scheduler.step ──► step ──► ...
    abort    ── note   ──►   │             │ ended
    load     ── staged ──►   │             ▼
       ▲                     └─ read between two steps; the thread sleeps on it when there is no work
       └──────────── results, one wake-up of the loop a step

The thread is unblocked by the inbox alone. What it owns (model, cache, batch) nobody else touches
after ``start``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config.schema import Config
from paceline.process.structured_log import event, first_line
from rollout_worker.engine.base import (
    Aborted,
    Completion,
    Engine,
    EngineError,
    EngineStats,
    GenerationFailed,
    OnPartial,
    Request,
)
from rollout_worker.engine.model import cache_budget, context_limit, end_tokens, load_model
from rollout_worker.engine.stopping import Decode, EndTokens
from rollout_worker.engine.transformers import fused_decoder
from rollout_worker.engine.transformers.decoder import Decoder, largest_gap
from rollout_worker.engine.transformers.fused_decoder import FusedDecoder
from rollout_worker.engine.transformers.hf_decoder import HFDecoder
from rollout_worker.engine.transformers.scheduler import Ended, Scheduler
from rollout_worker.engine.transformers.weights import WeightTable, copy_pairs

logger = logging.getLogger(__name__)

_PARITY = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest log-prob gap to the model's own forward that counts as rounding, by computation type."""


@dataclass(slots=True)
class _Pending:
    request: Request
    future: asyncio.Future[tuple[Completion, ...]]
    samples: list[Completion | None]
    missing: int
    error: Exception | None = None


@dataclass(slots=True)
class _Swap:
    version: int
    pairs: list[tuple[Tensor, Tensor]]
    future: asyncio.Future[float]


@dataclass(slots=True)
class _Inbox:
    """What the event loop left for the engine's thread, guarded by ``changed``."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    requests: list[Request] = field(default_factory=list)
    aborts: set[str] = field(default_factory=set)
    swaps: list[_Swap] = field(default_factory=list)
    closing: bool = False

    def empty(self) -> bool:
        return not (self.requests or self.aborts or self.swaps or self.closing)


class TransformersEngine(Engine):
    """``decode_text``: token ids to text, for stop strings. ``end_tokens``: ids that end a
    completion, beside those of the model's generation config. ``general``: never the fast path."""

    def __init__(
        self,
        config: Config,
        *,
        decode_text: Decode,
        end_tokens: tuple[int, ...] = (),
        general: bool = False,
    ) -> None:
        self._config = config
        self._decode_text = decode_text
        self._extra_end_tokens = end_tokens
        self._general = general
        self._inbox = _Inbox()
        self._pending: dict[str, _Pending] = {}
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._taken: list[_Swap] = []
        """Swaps that the thread is about to make."""
        self._over = asyncio.Event()
        """The thread has ended and everybody was told."""
        self._version = -1
        self._every = 0
        self._report: OnPartial = lambda request, samples: None
        self._idle_s = self._swap_s = 0.0
        self._idle_since: float | None = None
        self._samples = self._swaps = 0

    # ---- called from the event loop

    async def start(self) -> None:
        if self._thread is not None:
            return
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._build)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        self.check(request)
        if self._failure is not None or self._inbox.closing:
            raise EngineError(f"the engine is closed{self._why()}")
        if request.request_id in self._pending:
            raise EngineError(f"request {request.request_id} is already running")
        future: asyncio.Future[tuple[Completion, ...]] = self._loop.create_future()
        pending = _Pending(request, future, [None] * request.count, request.count)
        self._pending[request.request_id] = pending
        self._post(lambda inbox: inbox.requests.append(request))
        try:
            return await future
        finally:
            # Not there any more unless this task was cancelled while it waited.
            if self._pending.get(request.request_id) is pending:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        if request_id in self._pending:
            self._post(lambda inbox: inbox.aborts.add(request_id))

    def watch(self, every: int, report: OnPartial) -> None:
        self._report = report
        self._every = every

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        pairs = self._table.check(tensors)
        if self._failure is not None or self._inbox.closing:
            raise EngineError(f"the engine is closed{self._why()}")
        swap = _Swap(version, pairs, self._loop.create_future())
        self._post(lambda inbox: inbox.swaps.append(swap))
        return await swap.future

    async def until_failure(self) -> None:
        await self._over.wait()
        if self._failure is None:
            await super().until_failure()
        raise EngineError(f"the engine failed{self._why()}")

    @property
    def version(self) -> int:
        return self._version

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    @property
    def max_context(self) -> int:
        return self._max_context

    def stats(self) -> EngineStats:
        since = self._idle_since
        idle = self._idle_s + (time.monotonic() - since if since is not None else 0.0)
        return EngineStats(
            tokens=self._scheduler.tokens,
            samples=self._samples,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            idle_s=idle,
            swap_s=self._swap_s,
            swaps=self._swaps,
            steps=self._scheduler.steps,
        )

    async def close(self) -> None:
        if self._thread is None:
            return
        self._post(lambda inbox: setattr(inbox, "closing", True))
        await asyncio.to_thread(self._thread.join)

    def _post(self, put: Callable[[_Inbox], Any]) -> None:
        with self._inbox.changed:
            put(self._inbox)
            self._inbox.changed.notify()

    def _why(self) -> str:
        return f": {first_line(self._failure)}" if self._failure is not None else ""

    # ---- before the thread runs

    def _build(self) -> None:
        torch.set_num_threads(self._config.fleet.rollout_threads)
        model = load_model(self._config)
        vocabulary = self._vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self._max_context = context_limit(self._config, model.config)
        self._decoder = self._pick_decoder(model, vocabulary)
        self._table = WeightTable(model)
        shape = self._decoder.shape
        cache_tokens = cache_budget(shape.device) // shape.bytes_per_token
        if cache_tokens < self._max_context:
            raise EngineError(
                f"no memory for the cache of one sequence of {self._max_context} tokens: "
                f"lower rollout.max_context"
            )
        self._scheduler = Scheduler(
            self._decoder,
            slots=self._config.rollout.max_sequences,
            cache_tokens=cache_tokens,
            end_tokens=EndTokens({*self._extra_end_tokens, *end_tokens(model)}, vocabulary),
            decode_text=self._decode_text,
            vocabulary=vocabulary,
        )
        if self._config.rollout.stop or self._config.rollout.environment:
            # Now, where nothing waits for a token yet.
            self._scheduler.token_texts.build()
        event(
            logger,
            "engine ready",
            path=type(self._decoder).__name__,
            device=shape.device,
            dtype=str(shape.dtype).removeprefix("torch."),
            slots=self._config.rollout.max_sequences,
            context=self._max_context,
        )

    def _pick_decoder(self, model: PreTrainedModel, vocabulary: int) -> Decoder:
        tolerance = _PARITY[next(model.parameters()).dtype]
        if not self._general and fused_decoder.supports(model):
            lean = FusedDecoder(model)
            if (gap := largest_gap(lean, model, vocabulary)) <= tolerance:
                return lean
            event(logger, "fast path differs from the model: not used", logging.WARNING, gap=gap)
        kind = model.config.model_type
        try:
            general = HFDecoder(model)
            gap = largest_gap(general, model, vocabulary)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise EngineError(
                f"the transformers engine cannot run {kind}: {first_line(error)}"
            ) from error
        if not gap <= tolerance:
            raise EngineError(
                f"the transformers engine cannot run {kind}: cached generation differs from the "
                f"model's plain forward by {gap:.3g} in log-probability"
            )
        return general

    # ---- the engine's thread

    def _run(self) -> None:
        # Survived only to be told to everybody who waits; the worker then ends.
        try:
            while self._turn():
                pass
        except Exception as error:
            self._failure = error
            logger.exception("engine failed")
        finally:
            self._loop.call_soon_threadsafe(self._end_all)

    def _turn(self) -> bool:
        """Reads the inbox and makes one step. False once the engine is closing."""
        inbox = self._inbox
        if inbox.empty() and not (self._scheduler.running or self._scheduler.waiting):
            self._idle_since = time.monotonic()
            with inbox.changed:
                inbox.changed.wait_for(lambda: not inbox.empty())
            since, self._idle_since = self._idle_since, None
            self._idle_s += time.monotonic() - since
        requests: list[Request] = []
        aborts: set[str] = set()
        if not inbox.empty():
            with inbox.changed:
                requests, inbox.requests = inbox.requests, []
                aborts, inbox.aborts = inbox.aborts, set()
                self._taken, inbox.swaps = inbox.swaps, []
                if inbox.closing:
                    return False
        ended: list[Ended] = []
        for request in requests:
            ended += self._scheduler.add(request)
        for swap in self._taken:
            self._swap(swap)
        # Their tensors must not be kept until the next version comes.
        self._taken = []
        cut = self._scheduler.remove(aborts) if aborts else []
        ended += self._scheduler.step()
        if ended or aborts:
            self._loop.call_soon_threadsafe(self._deliver, ended, aborts, cut)
        if self._every and (due := self._scheduler.due(self._every)):
            self._loop.call_soon_threadsafe(self._tell, due)
        return True

    def _swap(self, swap: _Swap) -> None:
        started = time.monotonic()
        copy_pairs(swap.pairs)
        self._scheduler.set_version(swap.version)
        self._version = swap.version
        if self._decoder.shape.device.type == "cuda":
            torch.cuda.synchronize(self._decoder.shape.device)
        pause = time.monotonic() - started
        self._swap_s += pause
        self._swaps += 1
        self._loop.call_soon_threadsafe(_resolve, swap.future, pause)

    # ---- back in the event loop

    def _deliver(self, ended: list[Ended], aborts: set[str], cut: list[Ended]) -> None:
        for item in ended:
            pending = self._pending.get(item.request_id)
            if pending is None:
                continue
            pending.samples[item.index] = item.sample
            pending.missing -= 1
            self._samples += 1
            self.completion_finished(item.request_id)
            if item.sample is None:
                pending.error = GenerationFailed("the model's logits are not finite")
            if pending.missing == 0 and item.request_id not in aborts:
                del self._pending[item.request_id]
                self._finish(pending)
        for item in cut:
            if (pending := self._pending.get(item.request_id)) is not None:
                pending.samples[item.index] = item.sample
        for request_id in aborts:
            pending = self._pending.pop(request_id, None)
            if pending is not None and not pending.future.done():
                pending.future.set_exception(Aborted(request_id, tuple(pending.samples)))

    def _tell(self, due: list[Ended]) -> None:
        """Reports requests as they are: finished samples, running ones, and prefixes that wait."""
        running: dict[str, dict[int, Completion | None]] = {}
        for item in due:
            running.setdefault(item.request_id, {})[item.index] = item.sample
        for request_id, rows in running.items():
            if (pending := self._pending.get(request_id)) is None:
                continue
            prefixes = pending.request.prefixes or (None,) * pending.request.count
            samples = (
                rows.get(index) or done or prefix
                for index, (done, prefix) in enumerate(zip(pending.samples, prefixes, strict=True))
            )
            self._report(pending.request, tuple(samples))

    def _finish(self, pending: _Pending) -> None:
        if pending.future.done():
            return
        if pending.error is not None:
            pending.future.set_exception(pending.error)
        else:
            pending.future.set_result(tuple(s for s in pending.samples if s is not None))

    def _end_all(self) -> None:
        """The thread is over: whoever waits is told."""
        self._inbox.closing = True
        for request_id, pending in self._pending.items():
            if not pending.future.done():
                error = EngineError(f"the engine failed{self._why()}") if self._failure else None
                pending.future.set_exception(error or Aborted(request_id))
        self._pending.clear()
        for swap in [*self._taken, *self._inbox.swaps]:
            if not swap.future.done():
                swap.future.set_exception(EngineError(f"the engine is closed{self._why()}"))
        self._over.set()


def _resolve(future: asyncio.Future[float], value: float) -> None:
    if not future.done():
        future.set_result(value)
