"""Copying staged weights into a model's parameters: all of them or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rollout_worker.engine.base import WeightMismatch
from rollout_worker.engine.parameter_parity import ParameterPart


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
            raise WeightMismatch(f"weights unknown to the model: {_some(unknown)}")
        missing = [
            names[0] for names in self._names.values() if not any(n in tensors for n in names)
        ]
        if missing:
            raise WeightMismatch(f"weights missing: {_some(missing)}")
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


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
