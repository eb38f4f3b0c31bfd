"""Copying staged weights into a model's parameters: all of them or none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rollout_worker.engine.base import WeightMismatch


class WeightTable:
    """The model's parameters by name. Tied parameters have several names."""

    def __init__(self, model: nn.Module) -> None:
        self._by_name: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = {
            name: buffer
            for name, buffer in model.state_dict(keep_vars=True).items()
            if name not in self._by_name
        }
        self._names: dict[int, list[str]] = {}
        for name, parameter in self._by_name.items():
            self._names.setdefault(id(parameter), []).append(name)

    def check(self, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pairs (target, staged) that a swap copies. Raises WeightsRefused; changes nothing."""
        unknown = [n for n in tensors if n not in self._by_name and n not in self._buffers]
        if unknown:
            raise WeightMismatch(f"weights unknown to the model: {_some(unknown)}")
        missing = [
            names[0] for names in self._names.values() if not any(n in tensors for n in names)
        ]
        if missing:
            raise WeightMismatch(f"weights missing: {_some(missing)}")
        targets = self._by_name | self._buffers
        for name, staged in tensors.items():
            if staged.shape != targets[name].shape:
                raise WeightMismatch(
                    f"{name} has shape {tuple(staged.shape)}, the model {tuple(targets[name].shape)}"
                )
        pairs = [(self._buffers[n], t) for n, t in tensors.items() if n in self._buffers]
        for names in self._names.values():
            given = [name for name in names if name in tensors]
            first = tensors[given[0]]
            for other in given[1:]:
                if tensors[other] is not first and not torch.equal(tensors[other], first):
                    raise WeightMismatch(f"{other} and {given[0]} are tied but differ")
            pairs.append((self._by_name[given[0]], first))
        return pairs

    def canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The staged tensors, tied ones once, under their first name. Raises WeightsRefused as check()."""
        self.check(tensors)
        result = {name: t for name, t in tensors.items() if name in self._buffers}
        for names in self._names.values():
            result[names[0]] = next(tensors[name] for name in names if name in tensors)
        return result


@torch.no_grad()
def copy_pairs(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copies every staged tensor into its target, converting type and device."""
    for target, staged in pairs:
        target.copy_(staged)


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
