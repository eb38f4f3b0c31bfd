"""Model files, device and sizes, for every engine."""

from collections.abc import Callable
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paceline.config.model_files import Loaded, load_pretrained
from paceline.config.schema import Config
from paceline.process.compute_device import compute_dtype, pick_device
from rollout_worker.engine.base import EngineError

_CACHE_SHARE = 0.5  # Part of the memory free after loading that the key-value cache may grow into


def from_pretrained(load: Callable[..., Loaded], config: Config, **arguments: Any) -> Loaded:
    """Calls a ``from_pretrained`` on model.path. Raises EngineError."""
    arguments["trust_remote_code"] = config.model.trust_remote_code
    return load_pretrained(load, "model.path", config.model.path, EngineError, **arguments)


def load_model(config: Config) -> PreTrainedModel:
    """The model in evaluation mode on its device. Raises EngineError."""
    device = pick_device(config.model.device)
    dtype = getattr(torch, compute_dtype(config.model, device.type, config.rollout.dtype))
    model = from_pretrained(AutoModelForCausalLM.from_pretrained, config, dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


def context_limit(config: Config, model: PretrainedConfig) -> int:
    """Longest prompt plus completion, in tokens. ``model``: the model's own config."""
    limit = config.longest_sequence
    positions = getattr(model.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(limit, positions) if positions else limit


def cache_budget(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
    return int(free * _CACHE_SHARE)
