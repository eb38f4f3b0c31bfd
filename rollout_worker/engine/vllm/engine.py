"""The vLLM engine: its public asynchronous engine, with in-flight weight updates.

    generate ──► Generation ──► AsyncLLM ──► EngineCore process ──► ranks

    load_weights ──► write shared weights ──► every rank stages them while the engine runs
        ──► pause ──► swap on all ranks (if one fails, all swap back) ──► compare the parameters
        ──► version ──► caches ──► resume

    park ──► end all requests ──► sleep: neither weights nor cache have memory
    unpark ──► wake the weights ──► load_weights fills them ──► wake the cache

``rollout.on_update`` decides what happens to running sequences:

* keep: they are paused and go on with their key-value cache. Sequences that have not started are
  restarted, because the first blocks of their prefix may come from the old weights.
* recompute: they are paused; their cache is dropped and recomputed from their tokens.
* drain: they are finished first; waiting sequences keep waiting.

A version that is not newer than the served one replaces weights that were never committed: running
requests end, and the cache is emptied.

With ``model.lora`` the weights that come are adapters, and the base is loaded at the start: the
same steps put them into the slots of the adapter that every request carries. Without slots
(``adapters.obstacle``) they are merged into a copy of the base, which takes the way of whole
weights.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from paceline.config.schema import Config
from paceline.lora import merged
from paceline.process.structured_log import event
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import (
    Aborted,
    Completion,
    Engine,
    EngineDied,
    EngineError,
    EngineStats,
    OnPartial,
    ParametersDiffer,
    Request,
    SwapFailed,
    WeightMismatch,
    some,
)
from rollout_worker.engine.model import trial
from rollout_worker.engine.parameters import COMPLETE_EVERY
from rollout_worker.engine.vllm import adapters, internals, readback
from rollout_worker.engine.vllm.client import VLLMClient
from rollout_worker.engine.vllm.generation import Generation
from rollout_worker.engine.vllm.rank_weights import SharedWeights, share, stage

logger = logging.getLogger(__name__)


class VLLMEngine(Engine):
    exact_continuation = False
    least_temperature = 0.01
    most_temperature = 2.0

    def __init__(self, config: Config, tokenizer: PromptTokenizer) -> None:
        if not self.least_temperature <= config.rollout.temperature <= self.most_temperature:
            raise EngineError(
                f"rollout.temperature is {config.rollout.temperature:g}; vLLM samples at "
                f"{self.least_temperature:g} to {self.most_temperature:g}"
            )
        self._config = config
        self.on_update = config.rollout.on_update  # The next swap's treatment of running sequences
        self._client = VLLMClient(config)
        self._requests = Generation(
            self._client,
            tokenizer,
            config.rollout.max_sequences,
            heal=self._empty_cache,
            finished=lambda request_id: self.completion_finished(request_id),
        )
        self._first_sync = config.rollout.verify  # It is still to come, or to be verified
        self._verify_every = COMPLETE_EVERY if config.rollout.verify else 0
        """Swaps from one complete comparison of the parameters to the next; 0: no comparison."""
        self._checked = 0  # Swaps whose parameters were compared and equal, the first one included
        self._usable = False  # The model's weights are defined
        self._distrusted = False
        """The parameters differed after the newest swap: no tokens until the next load."""
        self._proven = False  # Weights were loaded and, if configured, verified
        self._version = -1
        self._asleep = False  # vLLM's cache has no memory
        self._served: SharedWeights | None = None
        self._swapping = asyncio.Lock()
        self._emptying = False
        self._pause_s = self._stage_s = 0.0
        self._swaps = 0

    async def start(self) -> None:
        started = time.monotonic()
        await self._client.start()
        try:
            await self._client.call(self._client.llm.update_weight_version("-1"))
            await self._requests.begin()
        except EngineError as error:
            # It had started: a rank or the engine's process was killed.
            raise EngineDied(str(error)) from error
        spec = self._client.spec
        if spec.routed and spec.ranks_note:
            await self._client.ranks("paceline_note_routes")
        self.vocabulary, self.max_context = spec.vocabulary, spec.max_context
        self._usable = spec.has_weights
        event(
            logger,
            "engine ready",
            path="vllm",
            context=spec.max_context,
            slots=self._config.rollout.max_sequences,
            ranks=spec.ranks,
            ms=(time.monotonic() - started) * 1e3,
        )

    async def close(self) -> None:
        if self._requests.closed:
            return
        await self._requests.close()
        if self._served is not None:
            self._served.close()
        await self._client.close()

    async def until_failure(self) -> None:
        await self._client.until_dead()

    def stats(self) -> EngineStats:
        return replace(
            self._requests.stats(), swap_s=self._pause_s, swaps=self._swaps, stage_s=self._stage_s
        )

    # ---- generating

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        self.check(request)
        if self._requests.closed:
            raise EngineError("the engine is closed")
        if self._distrusted:
            raise Aborted(request.request_id, request.prefixes)
        if not self._usable:
            raise EngineError("the engine has no weights yet")
        return await self._requests.generate(request)

    def abort(self, request_id: str) -> None:
        self._requests.abort(request_id)

    def watch(self, every: int, report: OnPartial) -> None:
        self._requests.watch(every, report)

    # ---- turns

    async def park(self) -> None:
        async with self._swapping:
            self._usable, self._distrusted = False, True
            await self._requests.end_all()
            await self._client.ranks("paceline_leave_device")
            self._asleep = True
            # A base beside adapters is sent by nobody: vLLM keeps it on the host (level 1).
            level = 1 if self._client.spec.slots else 2
            await self._client.call(self._client.llm.sleep(level=level))

    async def unpark(self) -> None:
        # The cache comes after the weights, whose loading takes memory beside them.
        await self._client.call(self._client.llm.wake_up(tags=["weights"]))

    async def _wake_cache(self) -> None:
        if self._asleep:
            # What was staged beside the weights had the cache's room.
            await self._client.ranks("paceline_leave_device")
            await self._client.call(self._client.llm.wake_up(tags=["kv_cache"]))
            self._asleep = False

    # ---- weights

    @property
    def version(self) -> int:
        """-1 until the first weights are verified, and if the model's weights are undefined: no
        tokens must be requested then."""
        return self._version if self._proven and self._usable else -1

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        if self._requests.closed:
            raise EngineError("the engine is closed")
        named, lora = self._client.spec.table.canonical(tensors), self._config.model.lora
        if self._first_sync and lora is not None:
            drawn = trial(named, lora)
            await self._load(version, drawn)
            await self._verify(drawn)
        pause = await self._load(version, named)
        if self._first_sync and lora is None:
            await self._verify(named)
        self._first_sync = False
        self._usable = self._proven = True
        self._distrusted = False
        return pause

    async def _load(self, version: int, named: Mapping[str, Tensor]) -> float:
        """Stages and swaps. Returns the seconds that generation was paused."""
        base, lora = self._client.spec.base, self._config.model.lora
        if lora is not None and base is not None:
            # Of the base each time: versions do not drift.
            new = await asyncio.to_thread(lambda: dict(merged(base, named, lora)))
            named = {**base, **new}
        elif lora is not None:
            named = adapters.scaled(named, lora.scale)
        async with self._swapping:
            started = time.monotonic()
            try:
                weights = await asyncio.to_thread(share, version, named.items())
            except OSError as error:
                raise SwapFailed(f"weights {version} not staged: {error}") from error
            try:
                await stage(self._client, weights)
                self._stage_s = time.monotonic() - started
                pause = await self._swap(weights)
            except BaseException:
                weights.close()
                raise
            old, self._served = self._served, weights
            if old is not None:
                old.close()
                await self._client.ranks("paceline_drop", old.key)
        return pause

    async def _swap(self, weights: SharedWeights) -> float:
        """Swaps on all ranks or none. Returns the seconds that generation was paused."""
        llm, call, on_update = self._client.llm, self._client.call, self.on_update
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
            await self._wake_cache()
            if withdrawn:
                await self._requests.end_all()
            await call(llm.update_weight_version(str(weights.version)))
            self._version, self._requests.salt = weights.version, str(weights.key)
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
        self._pause_s += pause
        self._swaps += 1
        return pause

    async def _fill(self, weights: SharedWeights) -> None:
        problems = await self._fill_ranks(weights)
        if not problems:
            return
        event(logger, "swap failed", logging.WARNING, version=weights.version, error=problems[0])
        if self._served is None:
            self._usable = False
            raise EngineError(f"weights {weights.version} not loaded: {problems[0]}")
        old = self._served
        back = await self._fill_ranks(old)
        await self._client.ranks("paceline_drop", weights.key)
        if back:
            self._usable = False
            raise EngineError(f"weights {old.version} not restored: {back[0]}")
        await self._check(old)
        raise SwapFailed(f"weights {weights.version} not loaded: {problems[0]}")

    async def _fill_ranks(self, weights: SharedWeights) -> list[str]:
        """The ranks' errors."""
        arguments = weights.key, self._verify_every > 0, self._first_sync, self._complete
        return list(filter(None, await self._client.ranks("paceline_swap", *arguments)))

    @property
    def _complete(self) -> bool:
        """The next comparison reads all elements."""
        due = self._verify_every > 0 and self._checked % self._verify_every == 0
        return due or self._distrusted or self._first_sync

    async def _check(self, weights: SharedWeights) -> None:
        """While generation is paused: compares the parameters. If they differ, ends all requests
        and raises ParametersDiffer."""
        if not self._verify_every:
            return
        ranks = await self._client.ranks("paceline_check", weights.key, self._complete)
        if wrong := list(dict.fromkeys(name for names in ranks for name in names)):
            self._usable, self._distrusted = False, True
            await self._requests.end_all()
            if weights is not self._served:
                await self._client.ranks("paceline_drop", weights.key)
            raise ParametersDiffer.of(weights.version, wrong)
        self._checked += 1

    async def _verify(self, named: Mapping[str, Tensor]) -> None:
        """Checks the kernels' results with the served weights, ``named``, by log-probs."""
        assert self._served is not None
        spec, key = self._client.spec, self._served.key
        request = readback.probe(spec.vocabulary, spec.max_context)
        completions = await self._requests.generate(request)
        gap, scale = await asyncio.to_thread(
            readback.mean_gap, self._client.reference, named, request, completions
        )
        limit = readback.tolerance(spec.dtype, scale, quantised=spec.quantised)
        if not gap <= limit:
            self._usable = False
            ranks = await self._client.ranks("paceline_untraced", key) if self._verify_every else []
            untraced = sorted(set.intersection(*map(set, ranks))) if ranks else []
            raise WeightMismatch(
                f"after the first sync vLLM's log-probs differ from those of the weights sent by "
                f"{gap:.3g} on average, rounding explains {limit:.3g}"
                + (f"; vLLM copied nothing of {some(untraced)}" if untraced else "")
            )
        event(logger, "first sync verified", gap=gap, limit=limit)

    async def _empty_cache(self) -> None:
        """Empties the key-value cache. Non-finite values stay in it, and even at a masked position
        they corrupt later sequences that use the same memory."""
        if self._emptying:
            return
        self._emptying = True
        async with self._swapping:
            self._emptying = False
            event(logger, "cache emptied", logging.WARNING, why="log-probs that are not finite")
            llm = self._client.llm
            await self._client.call(internals.pause(llm, "keep"))
            try:
                await self._client.call(llm.reset_prefix_cache(reset_running_requests=True))
                await self._client.ranks("paceline_scrub")
            finally:
                await self._client.call(llm.resume_generation())
