"""The vLLM engine: its public asynchronous engine, with in-flight weight updates.

    generate ──► one vLLM request per sample ──► AsyncLLM ──► EngineCore process ──► ranks
    load_weights ──► swap

A completion that is continued from a prefix is drawn with other random numbers than an
uninterrupted one (``exact_continuation``); greedy completions are equal. The completions of a
request share their prefill through vLLM's prefix cache, in whole blocks. Cache entries are salted
with the version.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Collection, Coroutine, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.schema import Config
from paceline.process.structured_log import event, first_line
from paceline.process.threads import all_or_none
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import (
    Aborted,
    Completion,
    Engine,
    EngineDied,
    EngineError,
    EngineStats,
    Finish,
    GenerationFailed,
    OnPartial,
    Request,
)
from rollout_worker.engine.transformers.sampler import sample_keys
from rollout_worker.engine.vllm import internals
from rollout_worker.engine.vllm.client import VLLMClient
from rollout_worker.engine.vllm.outputs import GroupRequest, ProgressReporter, complete, join
from rollout_worker.engine.vllm.swap import WeightSwap

logger = logging.getLogger(__name__)

_CLOSE_S = 1.0


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
        self._tokenizer = tokenizer
        self._client = VLLMClient(config)
        self._swap = WeightSwap(
            self._client,
            self._generate if config.rollout.verify else None,
            lambda: self._end(self._groups.values()),
            config.rollout.verify_every if config.rollout.verify else 0,
        )
        self._groups: dict[str, GroupRequest] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False
        self._progress: ProgressReporter | None = None
        self._numbers = itertools.count(1)
        self._tokens = self._samples = 0
        self._idle_s = 0.0
        self._idle_since: float | None = None

    async def start(self) -> None:
        started = time.monotonic()
        await self._client.start()
        try:
            await self._client.call(self._client.llm.update_weight_version("-1"))
            # Asked now: otherwise vLLM asks during the first request, and an abort in the meantime
            # would find no request to end.
            self._tasks = await self._client.call(self._client.llm.get_supported_tasks())
        except EngineError as error:
            # It had started: a rank or the engine's process was killed.
            raise EngineDied(str(error)) from error
        internals.quieten()
        spec = self._client.spec
        self.vocabulary, self.max_context = spec.vocabulary, spec.max_context
        self._ends = list(self._tokenizer.end_tokens)
        self._swap.usable = spec.has_weights
        self._idle_since = time.monotonic()
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
        if self._closed:
            return
        self._closed = True
        if self._groups:
            self._spawn(self._end(self._groups.values()))
        if self._background:
            await asyncio.wait(set(self._background), timeout=_CLOSE_S)
        self._swap.close()
        await self._client.close()

    # ---- generating

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        self.check(request)
        if self._closed:
            raise EngineError("the engine is closed")
        if self._swap.distrusted:
            raise Aborted(request.request_id, request.prefixes)
        if not self._swap.usable:
            raise EngineError("the engine has no weights yet")
        if request.request_id in self._groups:
            raise EngineError(f"request {request.request_id} is already running")
        return await self._generate(request)

    async def _generate(self, request: Request) -> tuple[Completion, ...]:
        group = self._groups[request.request_id] = GroupRequest(request)
        if self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None
        if self._progress is not None:
            self._spawn(self._progress.watch())
        try:
            completions = await all_or_none(self._complete(group, i) for i in range(request.count))
        finally:
            del self._groups[request.request_id]
            if not self._groups:
                self._idle_since = time.monotonic()
        if group.aborted:
            raise Aborted(request.request_id, tuple(completions))
        return tuple(c for c in completions if c is not None)

    async def _complete(self, group: GroupRequest, index: int) -> Completion | None:
        """One completion of the request. None: aborted without a token."""
        request, params = group.request, group.request.params
        so_far = request.prefix(index)
        whole = complete(so_far, params.max_tokens, params.stop, self._tokenizer.decode_all)
        while whole is None:
            if group.aborted:
                return so_far
            output = await self._run(group, index, so_far)
            self._tokens += len(output.token_ids)
            try:
                so_far = join(so_far, output, params.stop, self._tokenizer.decode_all)
            except GenerationFailed:
                self._spawn(self._swap.heal())
                raise
            # Else aborted, or ended by a swap before its first token arrived: it restarts under the
            # new version.
            if so_far is not None and so_far.finish is not Finish.PARTIAL:
                whole = so_far
        self._samples += 1
        group.done[index] = whole
        self.completion_finished(request.request_id)
        return whole

    async def _run(self, group: GroupRequest, index: int, prefix: Completion | None) -> Any:
        """One vLLM request, to its end. Returns its CompletionOutput."""
        request, key = group.request, group.keys[index]
        name = f"{request.request_id}#{index}.{next(self._numbers)}"
        if prefix is not None:
            have = len(prefix.tokens)
            tokens = np.concatenate([request.prompt_tokens, prefix.tokens])
            prepared = self._prepared(request, tokens, have)
            # Not the random numbers that the prefix was drawn with.
            (key,) = sample_keys(key, np.array([have])).tolist()
        else:
            if group.fresh[0] != self._swap.salt:
                fresh = self._prepared(request, request.prompt_tokens, 0)
                group.fresh = self._swap.salt, fresh
            prepared = group.fresh[1]
        # vLLM takes seeds of 63 bits.
        seed = None if request.params.greedy else key >> 1
        asked = internals.another(prepared, name, seed)
        group.running[index] = name, prefix
        try:
            async for output in self._client.llm.generate(asked, asked.sampling_params, name):
                last = output
        except Exception as error:
            raise self._client.error(error) from error
        finally:
            del group.running[index]
        return last.outputs[0]

    def _prepared(self, request: Request, tokens: NDArray[np.int32], have: int) -> Any:
        """vLLM's request for a completion. ``have``: number of tokens that were generated."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        prompt, given = tokens_input(tokens.tolist(), cache_salt=self._swap.salt), request.params
        drawn = {"temperature": given.temperature, "top_p": given.top_p, "top_k": given.top_k}
        try:
            params = SamplingParams(
                max_tokens=given.max_tokens - have,
                **({"temperature": 0.0} if given.greedy else {**drawn, "seed": 0}),
                stop=list(given.stop),
                stop_token_ids=self._ends,
                # Stop strings may contain special tokens.
                skip_special_tokens=False,
                spaces_between_special_tokens=False,
                detokenize=bool(given.stop),
                logprobs=0,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            return internals.prepared(self._client.llm, prompt, params, self._tasks)
        except Exception as error:
            failure = self._client.error(error)
            if self._closed or isinstance(failure, EngineDied):
                raise failure from error
            # vLLM's front end refused this one request; the engine goes on.
            raise GenerationFailed(str(failure)) from error

    def abort(self, request_id: str) -> None:
        if (group := self._groups.get(request_id)) is not None:
            self._spawn(self._end([group]))

    def _end(self, groups: Collection[GroupRequest]) -> Coroutine[Any, Any, None]:
        """Marks groups as aborted. Returns the call that ends their vLLM requests."""
        for group in groups:
            group.aborted = True
        names = [name for group in groups for name, _ in group.running.values()]
        return self._client.call(self._client.llm.abort(names))

    def watch(self, every: int, report: OnPartial) -> None:
        if every:
            self._progress = ProgressReporter(
                self._groups, self._client, self._tokenizer.decode_all, every, report
            )

    # ---- weights

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        if self._closed:
            raise EngineError("the engine is closed")
        return await self._swap.load(version, tensors, self.on_update)

    async def until_failure(self) -> None:
        await self._client.until_dead()

    @property
    def version(self) -> int:
        return self._swap.version

    def stats(self) -> EngineStats:
        swap, since = self._swap, self._idle_since
        llm = self._client.llm
        unfinished = [] if llm is None else list(internals.states(llm))
        slots = self._config.rollout.max_sequences
        return EngineStats(
            tokens=self._tokens + sum(map(internals.tokens_so_far, unfinished)),
            samples=self._samples,
            running=min(len(unfinished), slots),
            waiting=max(0, len(unfinished) - slots),
            idle_s=self._idle_s + (time.monotonic() - since if since is not None else 0.0),
            swap_s=swap.pause_s,
            swaps=swap.count,
            stage_s=swap.stage_s,
        )

    # ---- background work

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        def over(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            # The requests concerned fail by themselves.
            if not task.cancelled() and (error := task.exception()) is not None:
                event(logger, "background work failed", logging.WARNING, error=first_line(error))

        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(over)
