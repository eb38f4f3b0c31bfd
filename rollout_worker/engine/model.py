"""Model files, device and sizes, for every engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paceline.config.schema import Config
from paceline.process.structured_log import first_line
from rollout_worker.engine.base import EngineError

_CACHE_SHARE = 0.5
"""Part of the memory free after loading that the key-value cache may grow into."""
_T = TypeVar("_T")


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError('model.device is "cuda", but torch finds no CUDA device')
    return torch.device(name)


def model_path(config: Config) -> str:
    """model.path, with ~ expanded; or a hub name."""
    path = config.model.path
    return str(Path(path).expanduser()) if path.startswith("~") else path


def from_pretrained(load: Callable[..., _T], config: Config, **arguments: Any) -> _T:
    """Calls a ``from_pretrained`` on model.path. Raises EngineError."""
    path = model_path(config)
    if path.startswith(("/", ".")) and not Path(path).is_dir():
        raise EngineError(f"model.path: no such directory: {path}")
    try:
        return load(path, trust_remote_code=config.model.trust_remote_code, **arguments)
    # Whatever transformers raises for a bad directory, name, file or config is bad input here.
    except Exception as error:
        raise EngineError(f"model.path: cannot load {path}: {first_line(error)}") from error


def compute_dtype(config: Config) -> str:
    return config.model.dtype if config.rollout.dtype == "auto" else config.rollout.dtype


def load_model(config: Config) -> PreTrainedModel:
    """The model in evaluation mode on its device. Raises EngineError."""
    device = pick_device(config.model.device)
    dtype = getattr(torch, compute_dtype(config))
    model = from_pretrained(AutoModelForCausalLM.from_pretrained, config, dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


def context_limit(config: Config, model: PretrainedConfig) -> int:
    """Longest prompt plus completion, in tokens. ``model``: the model's own config."""
    limit = config.rollout.max_context or (
        config.data.max_prompt_tokens + config.rollout.max_tokens
    )
    positions = getattr(model.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(limit, positions) if positions else limit


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """End tokens of the model's generation config, else of its config."""
    for source in (model.generation_config, model.config):
        tokens = getattr(source, "eos_token_id", None)
        if tokens is not None:
            return frozenset([tokens] if isinstance(tokens, int) else tokens)
    return frozenset()


def cache_budget(device: torch.device) -> int:
    """Bytes that the key-value cache may take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
    return int(free * _CACHE_SHARE)
