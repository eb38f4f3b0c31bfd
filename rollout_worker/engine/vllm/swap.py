"""Weight swaps while requests run.

    write shared weights ──► every rank stages them while the engine runs
    pause ──► swap on all ranks (if one fails, all swap back) ──► compare the parameters
          ──► version ──► caches ──► resume

``rollout.on_update`` decides what happens to running sequences:

* keep: they are paused and go on with their key-value cache. Sequences that have not started are
  restarted, because the first blocks of their prefix may come from the old weights.
* recompute: they are paused; their cache is dropped and recomputed from their tokens.
* drain: they are finished first; waiting sequences keep waiting.

A version that is not newer than the served one replaces weights that were never committed: running
requests end, and the cache is emptied.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from paceline.process.structured_log import event
from rollout_worker.engine.base import (
    Completion,
    EngineError,
    ParametersDiffer,
    Request,
    SwapFailed,
    WeightMismatch,
)
from rollout_worker.engine.vllm import internals, readback
from rollout_worker.engine.vllm.client import VLLMClient
from rollout_worker.engine.vllm.rank_weights import SharedWeights, share, stage

logger = logging.getLogger(__name__)

OnUpdate = Literal["keep", "recompute", "drain"]


@dataclass
class WeightSwap:
    client: VLLMClient
    generate: Callable[[Request], Awaitable[tuple[Completion, ...]]] | None
    """For the check after the first sync; None: no check, or it is over."""
    end_all: Callable[[], Awaitable[None]]  # Aborts every running request
    verify_every: int
    """Swaps from one complete comparison of the parameters to the next; 0: none are compared."""
    usable: bool = False  # The model's weights are defined
    salt: str = "0"  # Salt of the prefix cache's entries; a new one for each load of weights
    pause_s: float = 0.0
    stage_s: float = 0.0
    """Staging time of the newest version: from the call to ready on every rank. Seconds."""
    count: int = 0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _served: SharedWeights | None = None
    _healing: bool = False
    _version: int = -1
    _checked: int = 0  # Swaps whose parameters were compared and equal, the first sync included
    distrusted: bool = False
    """The parameters differed after the newest swap: no tokens until weights are loaded again."""
    _proven: bool = False  # Weights were loaded and, if configured, verified

    @property
    def version(self) -> int:
        """-1 until the first weights are verified, and if the model's weights are undefined: no
        tokens must be requested then."""
        return self._version if self._proven and self.usable else -1

    async def load(self, version: int, tensors: Mapping[str, Tensor], on_update: OnUpdate) -> float:
        named = self.client.spec.table.canonical(tensors)
        async with self._lock:
            started = time.monotonic()
            try:
                weights = await asyncio.to_thread(share, version, named.items())
            except OSError as error:
                raise SwapFailed(f"weights {version} not staged: {error}") from error
            try:
                await stage(self.client, weights)
                self.stage_s = time.monotonic() - started
                pause = await self._swap(weights, on_update)
            except BaseException:
                weights.close()
                raise
            old, self._served = self._served, weights
            if old is not None:
                old.close()
                await self.client.ranks("paceline_drop", old.key)
        if self.generate is not None:
            await self._verify(self.generate, named)
            self.generate = None
        self.usable = self._proven = True
        self.distrusted = False
        return pause

    async def heal(self) -> None:
        """Empties the key-value cache. Non-finite values stay in it, and even at a masked position
        they corrupt later sequences that use the same memory."""
        if self._healing:
            return
        self._healing = True
        async with self._lock:
            self._healing = False
            event(logger, "cache emptied", logging.WARNING, why="log-probs that are not finite")
            llm = self.client.llm
            await self.client.call(internals.pause(llm, "keep"))
            try:
                await self.client.call(llm.reset_prefix_cache(reset_running_requests=True))
                await self.client.ranks("paceline_scrub")
            finally:
                await self.client.call(llm.resume_generation())

    def close(self) -> None:
        if self._served is not None:
            self._served.close()

    async def _swap(self, weights: SharedWeights, on_update: OnUpdate) -> float:
        """Swaps on all ranks or none. Returns the seconds that generation was paused."""
        llm, call = self.client.llm, self.client.call
        if withdrawn := weights.version <= self._version:
            on_update = "recompute"
        started = time.monotonic()
        await call(internals.pause(llm, "wait" if on_update == "drain" else "keep"))
        if on_update == "drain":
            # Until now sequences were generated: that does not count as a pause.
            started = time.monotonic()
        try:
            await self._fill(weights)
            await self._check(weights)
            if withdrawn:
                await self.end_all()
            await call(llm.update_weight_version(str(weights.version)))
            self._version, self.salt = weights.version, str(weights.key)
            emptied = on_update != "keep" and await call(
                llm.reset_prefix_cache(reset_running_requests=on_update == "recompute")
            )
            if not emptied:
                # Waiting sequences carry the salt of blocks that the old weights made. The engine
                # starts them again, with the new version's salt.
                states = [s for s in internals.states(llm) if internals.tokens_so_far(s) == 0]
                if names := list(map(internals.name_of, states)):
                    await call(llm.abort(names))
        finally:
            await call(llm.resume_generation())
        pause = time.monotonic() - started
        self.pause_s += pause
        self.count += 1
        return pause

    async def _fill(self, weights: SharedWeights) -> None:
        problems = await self._fill_ranks(weights)
        if not problems:
            return
        event(logger, "swap failed", logging.WARNING, version=weights.version, error=problems[0])
        if self._served is None:
            self.usable = False
            raise EngineError(f"weights {weights.version} not loaded: {problems[0]}")
        old = self._served
        back = await self._fill_ranks(old)
        await self.client.ranks("paceline_drop", weights.key)
        if back:
            self.usable = False
            raise EngineError(f"weights {old.version} not restored: {back[0]}")
        await self._check(old)
        raise SwapFailed(f"weights {weights.version} not loaded: {problems[0]}")

    async def _fill_ranks(self, weights: SharedWeights) -> list[str]:
        """The ranks' errors."""
        arguments = weights.key, self._compares, self.generate is not None
        return list(filter(None, await self.client.ranks("paceline_swap", *arguments)))

    @property
    def _compares(self) -> bool:
        return self.verify_every > 0 and not self.client.spec.quantised

    async def _check(self, weights: SharedWeights) -> None:
        """While generation is paused: compares the parameters. If they differ, ends all requests
        and raises ParametersDiffer."""
        if not self._compares:
            return
        due = self._checked % self.verify_every == 0
        complete = due or self.distrusted or self.generate is not None
        ranks = await self.client.ranks("paceline_check", weights.key, complete)
        if wrong := list(dict.fromkeys(name for names in ranks for name in names)):
            self.usable, self.distrusted = False, True
            await self.end_all()
            if weights is not self._served:
                await self.client.ranks("paceline_drop", weights.key)
            raise ParametersDiffer.of(weights.version, wrong)
        self._checked += 1

    async def _verify(
        self,
        generate: Callable[[Request], Awaitable[tuple[Completion, ...]]],
        named: Mapping[str, Tensor],
    ) -> None:
        """Checks the kernels' results by log-probs."""
        spec = self.client.spec
        request = readback.probe(spec.vocabulary, spec.max_context)
        completions = await generate(request)
        dtype = getattr(torch, spec.dtype)
        gap, scale = await asyncio.to_thread(
            readback.mean_gap, spec.model, named, dtype, request, completions
        )
        limit = readback.tolerance(spec.dtype, scale, quantised=spec.quantised)
        if not gap <= limit:
            self.usable = False
            raise WeightMismatch(
                f"after the first sync vLLM's log-probs differ from those of the weights sent by "
                f"{gap:.3g} on average, rounding explains {limit:.3g}"
            )
        event(logger, "first sync verified", gap=gap, limit=limit, compared=self._compares)
