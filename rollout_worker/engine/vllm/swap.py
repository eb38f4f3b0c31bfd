"""New weights under running requests.

    write a sealed segment ──► every rank stages it, beside the running engine
    pause ──► swap on all ranks; where one fails, all swap back ──► version ──► caches ──► resume

What the pause does to sequences in flight is ``rollout.on_update``:

* keep: they stand still and go on; their key-value cache is kept. What had not started starts anew,
  because the first blocks of its prefix may be those of the old weights.
* recompute: they stand still; their cache is dropped and computed anew from their tokens.
* drain: they are finished first; what waits, waits on.

A version that is not newer than the served one takes the place of weights that were never committed:
what was running ends, and no cache outlives them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Literal

import torch
from torch import Tensor

from paceline.process.structured_log import event
from rollout_worker.engine.base import (
    Completion,
    EngineError,
    Request,
    SwapFailed,
    WeightsRefused,
)
from rollout_worker.engine.vllm import internals, parity, readback, shared_weights
from rollout_worker.engine.vllm.client import VLLMClient
from rollout_worker.engine.vllm.stager import Stager

logger = logging.getLogger(__name__)

OnUpdate = Literal["keep", "recompute", "drain"]


class WeightSwap:
    """``generate``: for the comparison after the first sync; None: not made. ``end_all``: ends
    every running request where it is."""

    def __init__(
        self,
        client: VLLMClient,
        generate: Callable[[Request], Awaitable[tuple[Completion, ...]]] | None,
        end_all: Callable[[], Awaitable[None]],
    ) -> None:
        self._client = client
        self._end_all = end_all
        self._stager = Stager(client)
        self._generate = generate
        self._lock = asyncio.Lock()
        self._served: shared_weights.SharedWeights | None = None
        self._healing = False
        self._version = -1
        self._proven = False
        """Weights were loaded and, where asked for, verified."""
        self.salt = "0"
        """Of the prefix cache's entries: another one for each time that weights are loaded."""
        self.usable = client.facts.has_weights
        """The model's weights are defined."""
        self.pause_s = 0.0
        self.stage_s = 0.0
        """Of the newest version: from the call to ready on every rank. Seconds."""
        self.count = 0
        self.restarted = 0
        """Samples that had not started when a swap came."""

    @property
    def version(self) -> int:
        """-1 until the first weights are verified, and where the model's are not defined: nobody is
        to ask for tokens then."""
        return self._version if self._proven and self.usable else -1

    async def load(self, version: int, tensors: Mapping[str, Tensor], on_update: OnUpdate) -> float:
        """As Engine.load_weights()."""
        named = self._client.facts.table.canonical(tensors)
        async with self._lock:
            started = time.monotonic()
            try:
                segment = await asyncio.to_thread(shared_weights.write, version, named.items())
            except OSError as error:
                raise SwapFailed(f"weights {version} not staged: {error}") from error
            try:
                await self._stager.stage(segment)
                self.stage_s = time.monotonic() - started
                pause = await self._swap(segment, on_update)
            except BaseException:
                segment.close()
                raise
            old, self._served = self._served, segment
            if old is not None:
                old.close()
                await self._client.ranks("paceline_drop", old.key)
        if self._generate is not None:
            await self._verify(self._generate, named)
            self._generate = None
        self.usable = self._proven = True
        return pause

    async def heal(self) -> None:
        """Empties the key-value cache. What is not finite stays in it, and even at a masked position
        spoils the sequences that use the same memory later."""
        if self._healing:
            return
        self._healing = True
        async with self._lock:
            self._healing = False
            event(logger, "cache emptied", logging.WARNING, why="log-probs that are not finite")
            llm = self._client.llm
            await self._client.told(internals.pause(llm, "keep"))
            try:
                await self._client.told(llm.reset_prefix_cache(reset_running_requests=True))
                await self._client.ranks("paceline_scrub")
            finally:
                await self._client.told(llm.resume_generation())

    def close(self) -> None:
        self._stager.close()
        if self._served is not None:
            self._served.close()

    async def _swap(self, segment: shared_weights.SharedWeights, on_update: OnUpdate) -> float:
        """Returns the seconds that generation stood still. All ranks or none."""
        llm, told = self._client.llm, self._client.told
        if withdrawn := segment.version <= self._version:
            on_update = "recompute"
        started = time.monotonic()
        await told(internals.pause(llm, "wait" if on_update == "drain" else "keep"))
        if on_update == "drain":
            # Until here sequences were generated: that was no standstill.
            started = time.monotonic()
        try:
            await self._fill(segment)
            if withdrawn:
                await self._end_all()
            await told(llm.update_weight_version(str(segment.version)))
            self._version, self.salt = segment.version, str(segment.key)
            emptied = on_update != "keep" and await told(
                llm.reset_prefix_cache(reset_running_requests=on_update == "recompute")
            )
            if not emptied:
                # What waits has the salt of cached blocks that the old weights made.
                await self._restart_unstarted()
        finally:
            await told(llm.resume_generation())
        pause = time.monotonic() - started
        self.pause_s += pause
        self.count += 1
        return pause

    async def _fill(self, segment: shared_weights.SharedWeights) -> None:
        prove = self._generate is not None and not self._client.facts.quantised
        answers = await self._client.ranks("paceline_swap", segment.key, prove)
        problems = [error for error, _ in answers if error]
        if not problems:
            return
        event(logger, "swap failed", logging.WARNING, version=segment.version, error=problems[0])
        if self._served is None:
            self.usable = False
            raise EngineError(f"weights {segment.version} not loaded: {problems[0]}")
        old = self._served
        back = [e for e, _ in await self._client.ranks("paceline_swap", old.key) if e]
        await self._client.ranks("paceline_drop", segment.key)
        if back:
            self.usable = False
            raise EngineError(f"weights {old.version} not restored: {back[0]}")
        raise SwapFailed(f"weights {segment.version} not loaded: {problems[0]}")

    async def _restart_unstarted(self) -> None:
        """Their owner begins them anew, under the new version's salt."""
        llm = self._client.llm
        names = [
            internals.name_of(state)
            for state in internals.states(llm)
            if internals.tokens_so_far(state) == 0
        ]
        if names:
            self.restarted += len(names)
            await self._client.told(llm.abort(names))

    async def _verify(
        self,
        generate: Callable[[Request], Awaitable[tuple[Completion, ...]]],
        named: Mapping[str, Tensor],
    ) -> None:
        """The parameters by checksum, and what the kernels make of them by log-probs."""
        facts = self._client.facts
        proof = None if facts.quantised else await self._read_back(named)
        request = parity.probe(facts.vocabulary, facts.max_context)
        samples = await generate(request)
        dtype = getattr(torch, facts.dtype)
        expected, scale = await asyncio.to_thread(
            parity.plain_logprobs, facts.model, named, dtype, request, samples
        )
        gap = parity.mean_gap(samples, expected)
        limit = parity.tolerance(facts.dtype, scale, quantised=facts.quantised)
        if not gap <= limit:
            self.usable = False
            raise WeightsRefused(
                f"after the first sync vLLM's log-probs differ from those of the weights sent by "
                f"{gap:.3g} on average, where rounding explains {limit:.3g}"
            )
        parameters = {"quantised": True} if proof is None else asdict(proof)
        event(logger, "first sync verified", gap=gap, limit=limit, **parameters)
        if proof is not None and proof.equal < proof.total:
            # Loaders that compute something before they copy leave no trace of what went where.
            event(
                logger,
                "parameters not all read back: of the rest only the log-probs are known to be right",
                logging.WARNING,
                missing=proof.total - proof.equal,
            )

    async def _read_back(self, named: Mapping[str, Tensor]) -> readback.Proof:
        ranks = [
            [readback.ParameterSlice.from_wire(piece) for piece in pieces]
            for pieces in await self._client.ranks("paceline_proof")
        ]
        try:
            return await asyncio.to_thread(readback.compare, ranks, named)
        except readback.Differs as error:
            self.usable = False
            raise WeightsRefused(
                f"after the first sync vLLM's parameters differ from the weights sent: {error}"
            ) from error
