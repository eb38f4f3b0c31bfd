"""vLLM's engine arguments, from the config. ``rollout.vllm`` passes other arguments through; an
argument that Paceline sets is refused, with the name of the field that sets it."""

import difflib
import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from paceline.config.schema import Config
from paceline.cuda_extensions import VLLM_MARK
from paceline.process.compute_device import compute_dtype
from rollout_worker.engine.base import EngineError
from rollout_worker.engine.model import cache_budget, context_limit, model_path

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


def engine_arguments(config: Config, model: PretrainedConfig, *, cpu: bool) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs. ``cpu``: vLLM's platform is a CPU. Raises EngineError
    for an argument that does not exist or that another field sets."""
    rollout = config.rollout
    given = dict(rollout.vllm)
    _check_names(given)
    context = context_limit(config, model)
    arguments: dict[str, Any] = {
        "model": model_path(config),
        "tokenizer": config.model.tokenizer,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": compute_dtype(config.model, "cpu" if cpu else "cuda", rollout.dtype),
        "max_model_len": context,
        "max_num_seqs": rollout.max_sequences,
        "tensor_parallel_size": rollout.tensor_parallel,
        "seed": config.run.seed,
        # Of the distribution that was sampled from: temperature, top-k and top-p applied.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rollout_worker.engine.vllm.worker_extension.PacelineRank",
        # The first weights come over the weights link; reading a checkpoint first would waste time.
        "load_format": "dummy",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if cpu:
        # Compiling takes longer on a CPU than it saves, and the warm-up run would only determine
        # the cache size, which is given here.
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = cache_bytes(
            model, context, rollout.max_sequences, arguments["dtype"]
        )
        # If a prompt is split, vLLM 0.32 rewinds the random generator of its sequence, which fails
        # on a CPU: the engine process ends. So a step takes whole prompts only.
        if given.get("enable_chunked_prefill"):
            raise EngineError("rollout.vllm.enable_chunked_prefill needs a GPU with this vLLM")
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(context, 2048)
        if rollout.tensor_parallel == 1:
            # The rank lives in the engine's process: one process and one hop per step less.
            arguments["distributed_executor_backend"] = "uni"
    return arguments | given


def engine_environment(arguments: Mapping[str, Any], *, cpu: bool) -> None:
    """Environment variables for vLLM's processes that depend on their arguments."""
    if cpu and arguments.get("enforce_eager"):
        # Even so vLLM compiles a helper of its sampler: fifteen seconds before the first token.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if arguments.get("distributed_executor_backend") == "uni":
        # Otherwise vLLM starts a process for the rank only to set OMP_NUM_THREADS, which is set.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def cache_bytes(model: PretrainedConfig, context: int, sequences: int, dtype: str) -> int:
    """Bytes of a cache for ``sequences`` of ``context`` tokens, within the free memory."""
    text = model.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * width * (4 if dtype == "float32" else 2)
    # Blocks are filled by one sequence each; 128 is the largest default block size.
    blocks = -(-(context + 1) // 128) + 1
    free = cache_budget(torch.device("cpu"))
    return int(max(min(token * 128 * blocks * sequences, free), token * 128 * (blocks + 1)))


def _check_names(given: Mapping[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = set(AsyncEngineArgs.__dataclass_fields__)
    for name in given:
        if name in _SET_BY:
            by = _SET_BY[name]
            raise EngineError(
                f"rollout.vllm.{name} is set by " + (by if by else "Paceline and cannot be changed")
            )
        if name not in known:
            close = difflib.get_close_matches(name, known - set(_SET_BY), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise EngineError(f"rollout.vllm.{name} is not an engine argument of this vLLM{hint}")
