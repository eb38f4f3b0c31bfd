"""Training state of a policy replica between steps: its parts, optimizer state, numbers, step and
version.

Everything else a step needs is a pure function of these and of the config: the learning rate is
computed from ``step``, and nothing in the loss draws random numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.config.schema import Config
from paceline.ids import Step, Version
from paceline.lora import SUFFIXES

NO_VERSION = Version(-1)
"""The version of a state that no other process would recognise."""
_Stored = tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Module, str]]]


@dataclass
class TrainState:
    """The state after ``step`` committed steps, which the controller calls ``version``."""

    parts: dict[str, nn.Module]
    """The models that are trained, by name. The first is the main one: a policy, if any."""
    optimizer: torch.optim.Optimizer
    step: Step
    version: Version
    config: Config
    scalars: dict[str, Tensor] = field(default_factory=dict)
    """Numbers of the objective, such as running moments: float64 of no dimension, on the CPU."""
    _found: dict[str, _Stored] = field(default_factory=dict, init=False, repr=False)

    @property
    def main(self) -> str:
        """Name of the main part."""
        return next(iter(self.parts))

    @property
    def model(self) -> nn.Module:
        return self.parts[self.main]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of all parts: those of the main part under their Hugging Face names, those of
        another one with ``part_prefix`` before them. With [model.lora] adapters and scalar heads
        alone: each process reads their base from its files."""
        for part in self.parts:
            for name, tensor in self.weights_of(part):
                yield self.part_prefix(part) + name, tensor

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of all parts, under the names of named_weights()."""
        for part in self.parts:
            for name, parameter in self._stored(part)[0]:
                yield self.part_prefix(part) + name, parameter

    def parameters_of(self, part: str) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._stored(part)[0]]

    def weights_of(self, part: str) -> Iterator[tuple[str, Tensor]]:
        """Weights of one part under their Hugging Face names, tied ones once: parameters, then
        saved buffers. Tensors are the live ones, detached; copy them before the next commit. Of a
        sharded model they are this rank's DTensors."""
        parameters, buffers = self._stored(part)
        for name, parameter in parameters:
            yield name, parameter.detach()
        for name, module, key in buffers:
            yield name, module._buffers[key].detach()

    def frozen_base(self) -> Iterator[tuple[str, Tensor]]:
        """With [model.lora], the weights that no step changes, as named_weights()."""
        for part, model in self.parts.items() if self.config.model.lora is not None else ():
            for name, parameter in model.named_parameters():
                if not (parameter.requires_grad or name.endswith(SUFFIXES)):
                    yield self.part_prefix(part) + name, parameter.detach()

    def _stored(self, part: str) -> _Stored:
        """Parameters, and where saved buffers are. Looked up once: a walk over all modules takes
        milliseconds, parameters stay the same objects, and modules may get copies to compute with.
        """
        if part not in self._found and self.config.model.lora is not None:
            named = self.parts[part].named_parameters()
            self._found[part] = [(n, weight) for n, weight in named if weight.requires_grad], []
        elif part not in self._found:
            model = self.parts[part]
            self._found[part] = list(model.named_parameters()), list(saved_buffers(model))
        return self._found[part]

    def part_prefix(self, part: str) -> str:
        """The prefix of ``part`` in named_weights(); empty for the main one."""
        return "" if part == self.main else f"{part}/"


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Name of each buffer that checkpoints have; its module, and its name there."""
    for prefix, module in model.named_modules():
        for key, _ in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, module, key


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank stores: a DTensor's shard, any other tensor itself."""
    shard = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard


def local_slice(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's slice and its offset in the whole tensor."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        if not local.numel():
            return local, (0,) * local.ndim
        (chunk,) = tensor.__create_chunk_list__()
        return local, tuple(chunk.offsets)
    return tensor, (0,) * tensor.ndim


def slices_again(model: nn.Module) -> None:
    """After a forward pass without a backward: its root, and with
    train.memory.reshard_after_forward = false its blocks, are still gathered, and the state would
    no longer be slices. Of unsharded models nothing changes."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
