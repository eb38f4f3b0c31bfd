"""Activations of a row in host memory, from the forward pass until the backward pass needs them.

With gradient checkpointing this is the input of each block: 4 bytes a token, block and hidden
dimension. What a block computes again in its backward pass stays on the device, and so do the
weights, which a linear layer saves too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True, slots=True)
class _OnHost:
    copy: Tensor
    device: torch.device


def activations_on_host(tokens: int) -> AbstractContextManager[object]:
    """Around a forward pass of one row of so many tokens: what it saves of shape [1, tokens,
    features] goes to host memory.

    The copies are page-locked if the row is on a GPU. They are the saved values bit for bit.
    """

    def pack(saved: Tensor) -> Tensor | _OnHost:
        if saved.dim() != 3 or saved.shape[:2] != (1, tokens) or not saved.is_floating_point():
            return saved
        copy = torch.empty(saved.shape, dtype=saved.dtype, pin_memory=saved.is_cuda)
        copy.copy_(saved, non_blocking=True)  # later work of the stream waits for it
        return _OnHost(copy, saved.device)

    def unpack(packed: Tensor | _OnHost) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return packed.copy.to(packed.device, non_blocking=True)

    hooks: AbstractContextManager[object] = saved_tensors_hooks(pack, unpack)
    return hooks
