"""The default engine: continuous batching over a transformers model, in one thread.

    event loop                      engine thread
    generate ── submit ──► inbox ──► scheduler.step ──► step ──► ...
    abort    ── note   ──►   │             │ ended
    load     ── staged ──►   │             ▼
       ▲                     └─ read between two steps; the thread sleeps on it if there is no work
       └──────────── results, one wake-up of the loop a step

Only the inbox wakes the thread. After ``start``, model, cache and batch belong to the thread alone.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config.schema import Config
from paceline.lora import adapters_of
from paceline.process.parked_memory import ParkedMemory
from paceline.process.structured_log import event, first_line
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import (
    Aborted,
    Completion,
    Engine,
    EngineError,
    EngineStats,
    GenerationFailed,
    OnPartial,
    ParametersDiffer,
    Request,
)
from rollout_worker.engine.model import cache_budget, context_limit, load_model
from rollout_worker.engine.parameters import (
    COMPLETE_EVERY,
    ParameterPart,
    WeightTable,
    copy_parts,
    differing,
)
from rollout_worker.engine.stopping import TokenTexts
from rollout_worker.engine.transformers import fused_decoder
from rollout_worker.engine.transformers.batch import Ended
from rollout_worker.engine.transformers.decoder import Decoder, largest_gap
from rollout_worker.engine.transformers.fused_decoder import FusedDecoder
from rollout_worker.engine.transformers.hf_decoder import HFDecoder
from rollout_worker.engine.transformers.scheduler import Scheduler
from rollout_worker.engine.transformers.step_graphs import CudaGraph, NewGraph

logger = logging.getLogger(__name__)

_PARITY = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest log-prob gap to the model's own forward that counts as rounding, by computation type."""


@dataclass(slots=True)
class _Pending:
    request: Request
    future: asyncio.Future[tuple[Completion, ...]]
    completions: list[Completion | None]
    missing: int
    error: Exception | None = None


@dataclass(slots=True)
class _Call:
    """Work for the engine's thread between two steps."""

    work: Callable[[], Any]
    future: asyncio.Future[Any]


_Message = Request | str | _Call | None


class TransformersEngine(Engine):
    """``general``: do not use the fused decoder. ``new_graph``: captures decode steps; by default
    CUDA graphs do, on CUDA."""

    def __init__(
        self,
        config: Config,
        tokenizer: PromptTokenizer,
        *,
        general: bool = False,
        new_graph: NewGraph | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._general = general
        self._new_graph = new_graph
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        """To the engine's thread: new requests, ids of requests to abort, weights, ends of turns,
        None to end."""
        self._pending: dict[str, _Pending] = {}
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._scheduler: Scheduler
        self._loading: set[asyncio.Future[Any]] = set()
        """Loads of weights, and ends of turns, that wait for the thread."""
        self._closed = False
        self._over = asyncio.Event()  # The thread has ended, and all callers have their result
        self._version = -1
        self._trusted = config.model.lora is None
        """The model's parameters are those of the newest version: sequences may go on. Without
        adapters from the trainer a model of adapters generates nothing."""
        self._verify_every = COMPLETE_EVERY if config.rollout.verify else 0
        self._every = 0
        self._report: OnPartial = lambda request, completions: None
        self._idle_s = self._swap_s = 0.0
        self._idle_since: float | None = None
        self._samples = self._swaps = 0

    # ---- called from the event loop

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._build)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        self.check(request)
        if self._closed:
            raise self._closed_error()
        if request.request_id in self._pending:
            raise EngineError(f"request {request.request_id} is already running")
        pending = _Pending(
            request, self._loop.create_future(), [None] * request.count, request.count
        )
        self._pending[request.request_id] = pending
        self._inbox.put(request)
        try:
            return await pending.future
        finally:
            # Not there any more unless this task was cancelled while it waited.
            if self._pending.get(request.request_id) is pending:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        if request_id in self._pending:
            self._inbox.put(request_id)

    def watch(self, every: int, report: OnPartial) -> None:
        self._report = report
        self._every = every

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        parts = self._table.parts(tensors)
        pause: float = await self._between_steps(partial(self._swap, version, parts))
        return pause

    async def park(self) -> None:
        for request_id in self._pending:
            self.abort(request_id)
        await self._between_steps(self._park)

    async def unpark(self) -> None:
        await self._between_steps(self._parked.unpark)

    async def _between_steps(self, work: Callable[[], Any]) -> Any:
        """The result of ``work`` on the engine's thread, which ends if it raises anything but
        ParametersDiffer."""
        if self._closed:
            raise self._closed_error()
        future = self._loop.create_future()
        self._loading.add(future)
        self._inbox.put(_Call(work, future))
        try:
            return await future
        finally:
            self._loading.discard(future)

    async def until_failure(self) -> None:
        await self._over.wait()
        if self._failure is None:
            await super().until_failure()
        raise self._closed_error()

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        since = self._idle_since
        idle = self._idle_s + (time.monotonic() - since if since is not None else 0.0)
        if self._thread is None:  # before the start
            return EngineStats()
        return EngineStats(
            tokens=self._scheduler.tokens,
            samples=self._samples,
            running=self._scheduler.batch.size,
            waiting=self._scheduler.admission.waiting,
            idle_s=idle,
            swap_s=self._swap_s,
            swaps=self._swaps,
        )

    async def close(self) -> None:
        if self._thread is None:
            return
        self._closed = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _closed_error(self) -> EngineError:
        if self._failure is None:
            return EngineError("the engine is closed")
        return EngineError(f"the engine failed: {first_line(self._failure)}")

    # ---- before the thread runs

    def _build(self) -> None:
        torch.set_num_threads(self._config.fleet.rollout_threads)
        model = load_model(self._config)
        if self._config.takes_turns:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()  # out of a file's mapping, which stays
        vocabulary = self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self.max_context = context_limit(self._config, model.config)
        self._decoder = self._pick_decoder(model, vocabulary)
        self._table = WeightTable(model)
        shape = self._decoder.shape
        self._weights = {*adapters_of(model).values()} or {*model.parameters()}
        self._base = {*model.parameters()} - self._weights
        self._parked = ParkedMemory(shape.device)
        budget = cache_budget(self._config, shape.device)
        budget -= self._config.rollout.max_sequences * shape.bytes_per_row
        cache_tokens = budget // shape.bytes_per_token
        if cache_tokens < self.max_context:
            raise EngineError(
                f"no memory for the cache of one sequence of {self.max_context} tokens: "
                f"lower rollout.max_context"
            )
        texts = TokenTexts(self._tokenizer.decode_all, vocabulary)
        rollout = self._config.rollout
        # A graph would note the experts of the step in which it was captured.
        if shape.device.type == "cuda" and rollout.cuda_graphs and not rollout.router_replay:
            self._new_graph = self._new_graph or CudaGraph
        self._scheduler = Scheduler(
            self._decoder,
            slots=self._config.rollout.max_sequences,
            cache_tokens=cache_tokens,
            context=self.max_context,
            end_tokens=self._tokenizer.end_tokens,
            texts=texts,
            new_graph=self._new_graph,
        )
        event(
            logger,
            "engine ready",
            path=type(self._decoder).__name__,
            device=shape.device,
            dtype=str(shape.dtype).removeprefix("torch."),
            slots=self._config.rollout.max_sequences,
            context=self.max_context,
        )

    def _pick_decoder(self, model: PreTrainedModel, vocabulary: int) -> Decoder:
        tolerance = _PARITY[next(model.parameters()).dtype]
        if not self._general and fused_decoder.supports(model):
            fused = FusedDecoder(model)
            if (gap := largest_gap(fused, model, vocabulary)) <= tolerance:
                return fused
            event(
                logger, "fused decoder differs from the model: not used", logging.WARNING, gap=gap
            )
        cannot = f"the transformers engine cannot run {model.config.model_type}:"
        try:
            general = HFDecoder(model, notes_routes=self._config.rollout.router_replay)
            gap = largest_gap(general, model, vocabulary)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise EngineError(f"{cannot} {first_line(error)}") from error
        if not gap <= tolerance:
            raise EngineError(
                f"{cannot} cached generation differs from the model's plain forward by {gap:.3g} "
                "in log-probability"
            )
        return general

    # ---- the engine's thread

    def _run(self) -> None:
        # Caught only to pass it on to all callers; then the worker ends.
        try:
            while self._turn():
                pass
        except Exception as error:
            self._failure = error
            logger.exception("engine failed")
        finally:
            self._loop.call_soon_threadsafe(self._end_all)

    def _turn(self) -> bool:
        ended: list[Ended] = []
        cut: list[Ended] = []
        aborts: set[str] = set()
        for message in self._messages():
            match message:
                case Request():
                    ended += self._scheduler.add(message)
                case _Call():
                    cut += self._scheduler.remove(aborts)
                    self._do(message)
                case str():
                    aborts.add(message)
                case None:
                    return False
        cut += self._scheduler.remove(aborts) if aborts else []
        if self._trusted:
            ended += self._scheduler.step()
        if ended or aborts:
            self._loop.call_soon_threadsafe(self._deliver, ended, aborts, cut)
        if self._every and (due := self._scheduler.batch.due(self._every)):
            self._loop.call_soon_threadsafe(self._report_partial, due)
        return True

    def _messages(self) -> Iterator[_Message]:
        """Empties the inbox. Without any sequence to work on, it first waits for a message."""
        work = self._scheduler.batch.size or self._scheduler.admission.waiting
        if self._inbox.empty() and not (work and self._trusted):
            since = self._idle_since = time.monotonic()
            message = self._inbox.get()
            self._idle_since = None
            self._idle_s += time.monotonic() - since
            yield message
        while not self._inbox.empty():
            yield self._inbox.get()

    def _do(self, call: _Call) -> None:
        outcome: Any
        try:
            outcome = call.work()
        except ParametersDiffer as error:
            outcome = error
        self._loop.call_soon_threadsafe(_settle, call.future, outcome)

    def _swap(self, version: int, parts: list[ParameterPart]) -> float:
        """The seconds that generation was paused. Raises ParametersDiffer."""
        started = time.monotonic()
        copy_parts(parts)
        wrong: list[str] = []
        if every := self._verify_every:
            complete = self._swaps % every == 0 or not self._trusted
            wrong = differing(parts, complete=complete)
        self._trusted = not wrong
        self._version = -1 if wrong else version
        if wrong:
            raise ParametersDiffer.of(version, wrong)
        self._scheduler.set_version(version)
        if self._decoder.shape.device.type == "cuda":
            # Weights of the next version may be under way on other streams.
            torch.cuda.current_stream(self._decoder.shape.device).synchronize()
        pause = time.monotonic() - started
        self._swap_s += pause
        self._swaps += 1
        return pause

    def _park(self) -> None:
        # What is in the memory afterwards are the weights of no version.
        self._trusted, self._version = False, -1
        self._scheduler.drop_cache()
        self._parked.copy([], constant=self._base)  # nobody sends it
        self._parked.park(self._weights)

    # ---- back in the event loop

    def _deliver(self, ended: list[Ended], aborts: set[str], cut: list[Ended]) -> None:
        for item in ended:
            if (pending := self._pending.get(item.request_id)) is None:
                continue
            pending.completions[item.index] = item.completion
            pending.missing -= 1
            self._samples += 1
            self.completion_finished(item.request_id)
            if item.completion is None:
                pending.error = GenerationFailed("the model's logits are not finite")
            if pending.missing == 0 and item.request_id not in aborts:
                del self._pending[item.request_id]
                whole = tuple(c for c in pending.completions if c is not None)
                _settle(pending.future, pending.error or whole)
        for item in cut:
            if (pending := self._pending.get(item.request_id)) is not None:
                pending.completions[item.index] = item.completion
        for request_id in aborts:
            if (pending := self._pending.pop(request_id, None)) is not None:
                _settle(pending.future, Aborted(request_id, tuple(pending.completions)))

    def _report_partial(self, due: list[Ended]) -> None:
        """Reports requests: finished and running completions, and waiting prefixes."""
        running: dict[str, dict[int, Completion | None]] = {}
        for item in due:
            running.setdefault(item.request_id, {})[item.index] = item.completion
        for request_id, rows in running.items():
            if (pending := self._pending.get(request_id)) is None:
                continue
            request, done = pending.request, pending.completions
            so_far = (rows.get(i) or done[i] or request.prefix(i) for i in range(request.count))
            self._report(request, tuple(so_far))

    def _end_all(self) -> None:
        """The thread has ended: all callers get an error."""
        self._closed = True
        for request_id, pending in self._pending.items():
            _settle(pending.future, self._closed_error() if self._failure else Aborted(request_id))
        self._pending.clear()
        for future in self._loading:
            _settle(future, self._closed_error())
        self._over.set()


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
