"""Weights of a frozen model in host memory: each block's are on the device only while it computes.

before the root's forward    embeddings, last norm and head ──► device
before a block's forward     its weights ──► device
after either                 let go of; the host's copy was never written to
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def keep_on_host(model: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Keeps the parameters of ``model`` in host memory, and has each forward bring them to
    ``device``; buffers stay there.

    ``model``: on the host, without gradients. ``blocks``: modules of it that compute one after the
    other, none inside another. What is in none of them is on the device for the whole forward.
    """
    if device.type == "cuda":
        for parameter in model.parameters():
            parameter.data = parameter.data.pin_memory()
    in_blocks: set[nn.Parameter] = set()
    for block in blocks:
        parameters = set(block.parameters())
        in_blocks |= parameters
        _bring(block, parameters, device)
    _bring(model, set(model.parameters()) - in_blocks, device)
    buffers_to(model, device)


def buffers_to(model: nn.Module, device: torch.device) -> None:
    """Moves the buffers of ``model`` alone."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _bring(module: nn.Module, parameters: set[nn.Parameter], device: torch.device) -> None:
    places = [
        (owner, name, stored)
        for owner in module.modules()
        for name, stored in owner.named_parameters(recurse=False)
        if stored in parameters
    ]

    def to_device(*_: Any) -> None:
        moved = {
            stored: nn.Parameter(stored.to(device, non_blocking=True), requires_grad=False)
            for stored in parameters
        }
        for owner, name, stored in places:
            owner._parameters[name] = moved[stored]  # tied ones stay tied

    def back(*_: Any) -> None:
        for owner, name, stored in places:
            owner._parameters[name] = stored

    module.register_forward_pre_hook(to_device)
    # Also after a forward that failed, for want of memory above all.
    module.register_forward_hook(back, always_call=True)
