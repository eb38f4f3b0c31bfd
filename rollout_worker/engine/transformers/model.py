"""Loading a causal language model for generation."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.config.schema import Config
from paceline.process.structured_log import first_line
from rollout_worker.engine.base import EngineError

_CACHE_SHARE = 0.5
"""Part of the memory free after loading that the key-value cache may grow into."""


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError('model.device is "cuda", but torch finds no CUDA device')
    return torch.device(name)


def load_model(config: Config) -> PreTrainedModel:
    """The model in evaluation mode on its device. Raises EngineError with one line."""
    device = pick_device(config.model.device)
    wanted = config.rollout.dtype if config.rollout.dtype != "auto" else config.model.dtype
    path = config.model.path
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
        raise EngineError(f"model.path: no such directory: {path}")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(Path(path).expanduser()) if path.startswith("~") else path,
            dtype=getattr(torch, wanted),
            trust_remote_code=config.model.trust_remote_code,
        )
    # Whatever transformers raises for a bad directory, name, file or config is bad input here.
    except Exception as error:
        raise EngineError(f"model.path: cannot load {path}: {first_line(error)}") from error
    return model.to(device).eval().requires_grad_(False)


def context_limit(config: Config, model: PreTrainedModel) -> int:
    """Longest prompt plus completion, in tokens."""
    wanted = config.rollout.max_context or (
        config.data.max_prompt_tokens + config.rollout.max_tokens
    )
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(wanted, limit) if limit else wanted


def cache_budget(device: torch.device) -> int:
    """Bytes that the key-value cache may take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
    return int(free * _CACHE_SHARE)
