"""Weights of one version, staged for one rank: whole in memory that the ranks of a host share, and
the rank's slices of them on its device.

Once it is known which parts of the weights a rank copies (CopyPlan), it stages these alone: with
tensor parallelism about the whole over the ranks. Before that, and for models that have no plan, a
rank among several stages nothing: vLLM's loaders take its slices from host memory during the swap.
An engine of one rank needs everything, and stages it whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rollout_worker.engine.parameter_parity import ParameterPart
from rollout_worker.engine.vllm.readback import CopyPlan, Place, Views, part_of

_ROOM = 0.8
"""Share of the device's free memory that staging takes at most."""

_Name = TypeVar("_Name", str, Place)


@dataclass(frozen=True)
class RankWeights:
    tensors: Mapping[str, Tensor]
    """Whole, by name; not to be written to."""
    plan: CopyPlan | None = None
    slices: Mapping[Place, Tensor] | None = None
    """What ``plan`` copies, on the device; None: there is no room, or no plan."""

    def apply(self, plan: CopyPlan) -> None:
        if self.slices is None or self.plan is not plan:
            plan.apply(self.tensors)
        else:
            plan.copy([self.slices[key[:4]] for key in plan.views])

    def parts(self, views: Views) -> list[ParameterPart]:
        """The recorded copies, with what they should have copied."""
        slices = self.slices or {}
        found = []
        for key, memory in views.items():
            source = slices.get(key[:4])
            found.append(
                ParameterPart(
                    key[0], memory, part_of(self.tensors, key) if source is None else source
                )
            )
        return found


def stage_for(
    device: torch.device, tensors: Mapping[str, Tensor], plan: CopyPlan | None, *, ranks: int
) -> RankWeights:
    """``ranks``: of the engine."""
    if plan is not None:
        parts = {key[:4]: part_of(tensors, key) for key in plan.views}
        return RankWeights(tensors, plan, _on(device, parts))
    if ranks > 1:
        return RankWeights(tensors)
    return RankWeights(_on(device, tensors) or tensors)


def _on(device: torch.device, tensors: Mapping[_Name, Tensor]) -> dict[_Name, Tensor] | None:
    """Copies on the device, if it has room for them besides the engine."""
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if device.type != "cuda":
        return {name: tensor.clone() for name, tensor in tensors.items()}
    free, _ = torch.cuda.mem_get_info(device)
    if size > free * _ROOM:
        return None
    # A separate stream: on the engine's, the copies would delay its kernels.
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    stream.synchronize()
    return moved
