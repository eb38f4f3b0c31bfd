"""Training state of a policy replica between steps: parameters, optimizer state, step and version.

Everything else a step needs is a pure function of these and of the config: the learning rate is
computed from ``step``, and nothing in the loss draws random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.config.schema import Config
from paceline.ids import Step, Version

NO_VERSION = Version(-1)
"""The version of a state that no other process would recognise."""


@dataclass
class TrainState:
    """The state after ``step`` committed steps, which the controller calls ``version``."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    version: Version
    config: Config

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under their Hugging Face names, tied ones once: parameters, then saved buffers.

        Tensors are the live ones, detached; copy them before the next commit. Of a sharded model
        they are this rank's DTensors.
        """
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()
        for prefix, module in self.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer.detach()


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank stores: a DTensor's shard, any other tensor itself."""
    shard = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard
