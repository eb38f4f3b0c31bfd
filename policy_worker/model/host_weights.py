"""Weights of frozen models that are in host memory, but for the block that computes.

    compute    ... block 1 ......... block 2 ......... block 3 ...
                     ▲ waits           ▲ waits           ▲ waits
    copies     1 ────┘ 2 ──────────────┘ 3 ──────────────┘        on a stream of their own

The weights of the next block come while one computes, into the other one of two slots. A slot is
filled again once the block that was in it has computed, and not before: the host runs far ahead of
both streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from policy_worker.model.host_memory import CopyStream

ALIGNED = 256
"""Bytes at whose multiples a tensor in a slot begins."""
SLOTS = "_slots_on_device"
"""Attribute of a model whose blocks come to the device in turns."""


def keep_on_host(model: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Keeps the parameters of ``model`` in host memory, where they never change, and has each
    forward bring them to ``device``; buffers stay there. ``model``: on the host, without gradients.
    ``blocks``: modules of it that compute one after the other, none inside another, usually in this
    order. What is in none of them is on the device for the whole forward."""
    copies = CopyStream(device)
    if device.type == "cuda":
        for parameter in model.parameters():
            parameter.data = copies.host_memory(parameter).copy_(parameter.data)
    parts = [_Weights(block, set(block.parameters())) for block in blocks]
    rest = set(model.parameters()).difference(*(part.stored for part in parts))
    _bring_with_each_forward(_Weights(model, rest), device)
    if parts:
        setattr(model, SLOTS, _Slots(parts, copies, device))
    buffers_to(model, device)


def let_go(model: nn.Module) -> None:
    """Between two forwards, when the device has done all that it was given: frees what the weights
    of ``model`` take there, until the next forward."""
    if (slots := getattr(model, SLOTS, None)) is not None:
        slots.let_go()


def buffers_to(model: nn.Module, device: torch.device) -> None:
    """Moves the buffers of ``model`` alone."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


class _Weights:
    """Parameters of ``module`` that are ``stored`` on the host, and their places in it."""

    def __init__(self, module: nn.Module, stored: set[nn.Parameter]) -> None:
        self.module, self.stored = module, list(stored)
        self._places = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
            if parameter in stored
        ]

    def replace(self, others: Sequence[Tensor]) -> None:
        """Puts ``others`` in place of what is stored; tied ones stay tied."""
        by_stored = dict(zip(self.stored, others, strict=True))
        for owner, name, parameter in self._places:
            owner._parameters[name] = by_stored[parameter]

    def put_back(self) -> None:
        self.replace(self.stored)

    @property
    def ends(self) -> list[int]:
        """Bytes from the beginning of a slot to the end of each tensor, aligned."""
        return [*accumulate(-(-p.nbytes // ALIGNED) * ALIGNED for p in self.stored)]

    def views(self, memory: Tensor) -> list[nn.Parameter]:
        """``memory``, uint8, as the parameters."""
        begins = [0, *self.ends]
        parts = [memory[b : b + p.nbytes] for b, p in zip(begins, self.stored, strict=False)]
        shaped = [m.view(p.dtype).view(p.shape) for m, p in zip(parts, self.stored, strict=True)]
        return [nn.Parameter(tensor, requires_grad=False) for tensor in shaped]


def _bring_with_each_forward(weights: _Weights, device: torch.device) -> None:
    def bring(*_: Any) -> None:
        empty = [torch.empty_like(stored, device=device) for stored in weights.stored]
        moved = [e.copy_(s, non_blocking=True) for e, s in zip(empty, weights.stored, strict=True)]
        weights.replace([nn.Parameter(tensor, requires_grad=False) for tensor in moved])

    weights.module.register_forward_pre_hook(bring)
    # Also after a forward that failed, for want of memory above all.
    weights.module.register_forward_hook(lambda *_: weights.put_back(), always_call=True)


@dataclass(eq=False)
class _Slot:
    """Memory on the device for the weights of one block at a time."""

    memory: Tensor
    left: Any
    """Place of the computing stream after which the memory may be written."""
    holds: _Weights | None = None
    arrived: Any = None
    """End of the copy of what it holds."""
    views: dict[_Weights, list[nn.Parameter]] = field(default_factory=dict)


class _Slots:
    """Two slots for the weights of blocks: one for the block that computes, one for the next."""

    def __init__(
        self, blocks: Sequence[_Weights], copies: CopyStream, device: torch.device
    ) -> None:
        self._copies, self._device = copies, device
        self._size = max((weights.ends[-1] for weights in blocks if weights.stored), default=0)
        self._slots: list[_Slot] = []
        self._now: _Slot | None = None
        following = dict(zip(blocks, [*blocks[1:], blocks[0]], strict=True))
        for weights, other in following.items():
            weights.module.register_forward_pre_hook(partial(self._enter, weights, other))
            weights.module.register_forward_hook(partial(self._leave, weights), always_call=True)

    def let_go(self) -> None:
        self._slots.clear()
        self._now = None

    def _enter(self, weights: _Weights, following: _Weights, *_: Any) -> None:
        self._now = self._with(weights)
        self._copies.await_(self._now.arrived)
        weights.replace(self._now.views[weights])
        self._with(following)

    def _leave(self, weights: _Weights, *_: Any) -> None:
        weights.put_back()
        if self._now is not None:
            self._now.left = self._copies.reached()

    def _with(self, weights: _Weights) -> _Slot:
        """The slot that holds them, or from now on gets them: not the one that is in use."""
        for slot in self._slots:
            if slot.holds is weights:
                return slot
        if len(self._slots) < 2:
            memory = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._slots.append(_Slot(memory, self._copies.reached()))
            slot = self._slots[-1]
        else:
            slot = next(slot for slot in self._slots if slot is not self._now)
        if weights not in slot.views:
            slot.views[weights] = weights.views(slot.memory)
        slot.holds = weights
        slot.arrived = self._copies.copy(slot.views[weights], weights.stored, slot.left)
        return slot
