"""Model files, device, sizes and weights, for every engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paceline.config.model_files import Loaded, load_pretrained
from paceline.config.schema import Config
from paceline.process.compute_device import compute_dtype, pick_device
from rollout_worker.engine.base import EngineError, WeightMismatch
from rollout_worker.engine.parameter_parity import ParameterPart, some

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


class WeightTable:
    """The model's parameters and buffers by name. Tied parameters have several names."""

    def __init__(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._by_name: dict[str, Tensor] = model.state_dict(keep_vars=True) | parameters
        self._buffers = self._by_name.keys() - parameters.keys()
        self._names: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            self._names.setdefault(id(parameter), []).append(name)

    def canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The staged tensors, tied ones once, under their first name. Raises WeightMismatch."""
        unknown = [name for name in tensors if name not in self._by_name]
        if unknown:
            raise WeightMismatch(f"weights unknown to the model: {some(unknown)}")
        missing = [
            names[0] for names in self._names.values() if not any(n in tensors for n in names)
        ]
        if missing:
            raise WeightMismatch(f"weights missing: {some(missing)}")
        for name, staged in tensors.items():
            shape = self._by_name[name].shape
            if staged.shape != shape:
                raise WeightMismatch(
                    f"{name} has shape {tuple(staged.shape)}, the model {tuple(shape)}"
                )
        result = {name: staged for name, staged in tensors.items() if name in self._buffers}
        for names in self._names.values():
            given, *others = [name for name in names if name in tensors]
            first = tensors[given]
            for other in others:
                if tensors[other] is not first and not torch.equal(tensors[other], first):
                    raise WeightMismatch(f"{other} and {given} are tied but differ")
            result[names[0]] = first
        return result

    def parts(self, tensors: Mapping[str, Tensor]) -> list[ParameterPart]:
        """The copies of a swap. Raises WeightMismatch; changes nothing."""
        found = self.canonical(tensors)
        return [ParameterPart(name, self._by_name[name], staged) for name, staged in found.items()]


@torch.no_grad()
def copy_parts(parts: Sequence[ParameterPart]) -> None:
    """Copies every staged tensor into its parameter, converting type and device."""
    for part in parts:
        part.memory.copy_(part.source)
