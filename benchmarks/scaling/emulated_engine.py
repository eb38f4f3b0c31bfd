"""An engine that waits as a GPU would, and computes nothing.

submit ──► waiting ──► running: at most ``slots``, one token each in ``step_s + sequence_s *
running``

Lengths are drawn from a request's seed or given by its limit, tokens are random digits,
log-probabilities those of a uniform choice. The clock of the device goes on while the process is
not scheduled, as a GPU does; what the process does late, such as sending new requests, comes late.
A request joins at the next token boundary.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.scaling.device_times import DeviceTimes
from paceline.config.schema import Config
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import (
    Aborted,
    Completion,
    Engine,
    EngineError,
    EngineStats,
    Finish,
    Request,
    merge_spans,
)
from testbed.planner.lengths import Lengths


@dataclass(eq=False)
class Row:
    """One sequence."""

    request: Request
    index: int
    length: int
    done: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)


@dataclass(eq=False)
class Pending:
    """A request until its last completion is there."""

    left: int
    result: asyncio.Future[None]
    completions: list[Completion | None]


class EmulatedEngine(Engine):
    def __init__(
        self,
        times: DeviceTimes,
        *,
        vocabulary: int,
        context: int,
        letters: Sequence[int],
        end: int,
        draws: Lengths | None = None,
    ) -> None:
        """``letters``: the token ids of completions; ``end``: the one that ends them; ``draws``:
        what lengths are drawn from, None: every completion has its limit of tokens."""
        self.times = times
        self._draws = draws
        self.vocabulary = vocabulary
        self.max_context = context
        self._letters, self._end = np.array(letters, dtype=np.int32), end
        self._version = -1
        self._running: list[Row] = []
        self._waiting: deque[Row] = deque()
        self._pending: dict[str, Pending] = {}
        self._changed = asyncio.Event()
        self._boundary = 0.0
        """Time of the newest token, by time.monotonic()."""
        self._stats = EngineStats()
        self._loop: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, config: Config, tokenizer: PromptTokenizer, times: DeviceTimes) -> EmulatedEngine:
        shape: dict[str, Any] = json.loads((Path(config.model.path) / "config.json").read_text())
        return cls(
            times,
            vocabulary=shape["vocab_size"],
            context=shape["max_position_embeddings"],
            letters=tokenizer.encode("0123456789"),
            end=tokenizer.end_tokens[0],
            draws=times.lengths,
        )

    async def start(self) -> None:
        self._boundary = time.monotonic()
        self._loop = asyncio.create_task(self._run())
        self._loop.add_done_callback(self._ended)

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        self.check(request)
        if self._loop is None or request.request_id in self._pending:
            raise EngineError(f"closed, or request {request.request_id} is already running")
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pending = Pending(request.count, result, [None] * request.count)
        self._pending[request.request_id] = pending
        for index, length in enumerate(self._lengths(request)):
            row = Row(request, index, min(length, request.params.max_tokens))
            if (prefix := request.prefix(index)) is not None:
                row.done, row.spans = len(prefix.tokens), list(prefix.versions)
            self._waiting.append(row)
        self._changed.set()
        try:
            await result
        finally:
            self._drop(request.request_id)
        return tuple(c for c in pending.completions if c is not None)

    def abort(self, request_id: str) -> None:
        pending = self._pending.get(request_id)
        if pending is None or pending.result.done():
            return
        self._advance(time.monotonic())
        for row in (*self._running, *self._waiting):
            if row.request.request_id == request_id and row.done:
                pending.completions[row.index] = self._completion(row, Finish.PARTIAL)
        pending.result.set_exception(Aborted(request_id, tuple(pending.completions)))
        pending.result.exception()  # its caller may have been cancelled as well

    async def park(self) -> None:
        for request_id in list(self._pending):
            self.abort(request_id)
        self._version = -1
        await asyncio.sleep(self.times.switch_s)

    async def unpark(self) -> None:
        await asyncio.sleep(self.times.switch_s)

    async def until_failure(self) -> None:
        assert self._loop is not None, "not started"
        await asyncio.shield(self._loop)

    async def load_weights(self, version: int, tensors: Mapping[str, Any]) -> float:
        """Takes the time of a transfer and of a swap; ``tensors`` are not looked at."""
        await asyncio.sleep(self.times.transfer_s)
        self._advance(time.monotonic())
        self._version = version
        self._boundary = max(self._boundary, time.monotonic()) + self.times.swap_s
        self._changed.set()
        s = self._stats
        self._stats = replace(s, swaps=s.swaps + 1, swap_s=s.swap_s + self.times.swap_s)
        return self.times.swap_s

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        return replace(self._stats, running=len(self._running), waiting=len(self._waiting))

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
            self._loop = None
        for request_id in list(self._pending):
            self.abort(request_id)

    def _lengths(self, request: Request) -> list[int]:
        """Tokens of each completion; its limit of tokens may cut it."""
        if self._draws is None:
            return [request.params.max_tokens] * request.count
        rng = np.random.default_rng(request.params.seed)
        (lengths,) = self._draws.draw(rng, 1, request.count)
        return [int(length) for length in lengths]

    def _ended(self, loop: asyncio.Task[None]) -> None:
        if loop.cancelled() or (error := loop.exception()) is None:
            return
        for pending in self._pending.values():
            if not pending.result.done():
                pending.result.set_exception(error)

    # ---- the device

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            self._advance(time.monotonic())
            due = self._next_event()
            if due is None:
                idle_since = time.monotonic()
                await self._changed.wait()
                now = time.monotonic()
                self._stats = replace(self._stats, idle_s=self._stats.idle_s + now - idle_since)
                self._boundary = max(self._boundary, now)
                self._admit()
                continue
            try:
                async with asyncio.timeout(due - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _next_event(self) -> float | None:
        """Time at which a sequence ends or may join; None: nothing runs."""
        if not self._running:
            return None
        joins = self._waiting and len(self._running) < self.times.slots
        steps = 1 if joins else min(row.length - row.done for row in self._running)
        return self._boundary + max(1, steps) * self.times.token_s(len(self._running))

    def _advance(self, now: float) -> None:
        """All tokens until ``now``; sequences end and waiting ones join at token boundaries."""
        while self._running:
            token_s = self.times.token_s(len(self._running))
            joins = self._waiting and len(self._running) < self.times.slots
            most = 1 if joins else max(1, min(row.length - row.done for row in self._running))
            steps = min(most, math.floor((now - self._boundary) / token_s + 1e-9))
            if steps < 1:
                return
            self._boundary += steps * token_s
            for row in self._running:
                self._grow(row, min(steps, row.length - row.done))
            ended = [row for row in self._running if row.done >= row.length]
            self._running = [row for row in self._running if row.done < row.length]
            for row in ended:
                self._finish(row)
            self._admit()

    def _grow(self, row: Row, tokens: int) -> None:
        row.done += tokens
        row.spans.append((self._version, tokens))
        self._stats = replace(self._stats, tokens=self._stats.tokens + tokens)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.times.slots:
            self._running.append(self._waiting.popleft())

    def _finish(self, row: Row) -> None:
        pending = self._pending.get(row.request.request_id)
        if pending is None:
            return
        at_limit = row.length >= row.request.params.max_tokens
        finish = Finish.LENGTH if at_limit else Finish.STOP
        pending.completions[row.index] = self._completion(row, finish)
        pending.left -= 1
        self._stats = replace(self._stats, samples=self._stats.samples + 1)
        if not pending.left and not pending.result.done():
            pending.result.set_result(None)
        self.completion_finished(row.request.request_id)

    def _completion(self, row: Row, finish: Finish) -> Completion:
        tokens = self._tokens(row)[: row.done]
        if finish is Finish.STOP:
            tokens[-1] = self._end
        logprobs = np.full(row.done, -math.log(self.vocabulary), np.float32)
        return Completion(tokens, logprobs, merge_spans(row.spans), finish)

    def _tokens(self, row: Row) -> NDArray[np.int32]:
        """Tokens by seed: a continued completion equals the uninterrupted one."""
        rng = np.random.default_rng((row.request.params.seed, row.index))
        tokens: NDArray[np.int32] = rng.choice(self._letters, row.length)
        return tokens

    def _drop(self, request_id: str) -> None:
        """Whatever of the request is left leaves the device."""
        del self._pending[request_id]
        self._running = [r for r in self._running if r.request.request_id != request_id]
        self._waiting = deque(r for r in self._waiting if r.request.request_id != request_id)
        self._changed.set()
