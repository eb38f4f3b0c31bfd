"""Model files, device and sizes, for every engine."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paceline.config.model_files import Loaded, load_pretrained
from paceline.config.schema import Config
from paceline.config.sections.inputs import LoraConfig
from paceline.lora import SUFFIXES, adapters_of, attach
from paceline.memory_plan import room_of_a_turn, scorer_room
from paceline.model_shape import scorer_shapes
from paceline.process.compute_device import compute_dtype, pick_device
from paceline.process.parked_memory import await_room
from rollout_worker.engine.base import EngineError

_CACHE_SHARE = 0.5  # Part of the memory free after loading that the key-value cache may grow into


def from_pretrained(load: Callable[..., Loaded], config: Config, **arguments: Any) -> Loaded:
    """Calls a ``from_pretrained`` on model.path. Raises EngineError."""
    arguments["trust_remote_code"] = config.model.trust_remote_code
    return load_pretrained(load, "model.path", config.model.path, EngineError, **arguments)


def load_model(config: Config) -> PreTrainedModel:
    """The model in evaluation mode on its device. Raises EngineError."""
    device = pick_device(config.model.device)
    if config.takes_turns and device.type == "cuda":
        room = scorer_room(config, scorer_shapes(config))
        await_room(partial(torch.cuda.mem_get_info, device), room)
    dtype = compute_dtype(config.model, device.type, config.rollout.dtype)
    return read_model(config, dtype).to(device)


def read_model(config: Config, dtype: str) -> PreTrainedModel:
    """The model in evaluation mode, on the host. Its adapters, if it has some, are those of a trial
    until others come. Raises EngineError."""
    model: PreTrainedModel = from_pretrained(
        AutoModelForCausalLM.from_pretrained, config, dtype=getattr(torch, dtype)
    )
    if (lora := config.model.lora) is not None:
        attach(model, lora)
        mine = adapters_of(model)
        for name, tensor in trial(mine, lora).items():
            mine[name].data = tensor.to(model.dtype)
    return model.eval().requires_grad_(False)


_TRIAL = 0.3
"""Standard deviation, about, of what a trial adds to a layer's output: near that of the output."""


def trial(adapters: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """Other ``adapters``, which change every layer. The second matrices of new ones are zero: with
    them nobody could tell whether an engine computes with adapters at all."""
    longest = max(tensor.numel() for tensor in adapters.values())
    # Each takes its numbers from another place of one draw: a joiner waits for this.
    numbers = torch.randn(longest + len(adapters), generator=torch.Generator().manual_seed(1))
    drawn = {}
    for place, (name, tensor) in enumerate(adapters.items()):
        spread = (3 * tensor.shape[1]) ** -0.5  # that of new ones
        if name.endswith(SUFFIXES[1]):
            spread = _TRIAL / (lora.scale * math.sqrt(lora.rank))
        mine = numbers[place : place + tensor.numel()].view(tensor.shape)
        drawn[name] = (mine * spread).to(tensor)
    return drawn


def context_limit(config: Config, model: PretrainedConfig) -> int:
    """Longest prompt plus completion, in tokens. ``model``: the model's own config."""
    limit = config.longest_sequence
    positions = getattr(model.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(limit, positions) if positions else limit


def cache_budget(config: Config, device: torch.device) -> int:
    """Bytes for a key-value cache, after the model has been loaded."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available * _CACHE_SHARE)
    free, total = torch.cuda.mem_get_info(device)
    if config.takes_turns:
        # What is free does not tell whether scorers are there already: room is left for them once.
        beside = scorer_room(config, scorer_shapes(config)) + torch.cuda.memory_reserved(device)
        free = min(free, room_of_a_turn(total) - beside)
    return int(free * _CACHE_SHARE)
