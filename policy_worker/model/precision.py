"""bfloat16 weights to compute with, and the float32 ones that they are copies of.

    float32 weights ── once a step ──► copies in the modules ──► forward and backward of all rows
          ▲                                                                  │
          └── update ◄── float32 gradients ◄── each is added when complete ──┘

What flows between the modules is bfloat16, too, as in the engines that sample: they compute as in a
model that was loaded in bfloat16, and nothing is converted in a row. The ranks of a sharded replica
gather their weights in bfloat16 to the same effect (ranks.sharding).
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from policy_worker.model.heads import HEAD


def float32_names(model: nn.Module) -> Iterator[str]:
    """Names of the parameters and buffers that the architecture computes in float32 whatever the
    type of the model, such as a router's bias."""
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    choice = "|".join(rf"(?:^|\.)(?:{part})(?:$|\.)" for part in sorted(parts)) or "$^"
    named = (*model.named_parameters(), *model.named_buffers())
    return (name for name, _ in named if re.search(choice, name))


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Has the weights that are not trained in ``dtype``, except a scalar head and what the
    architecture keeps in float32. In place, also without memory."""
    kept = {f"{HEAD}.weight", *float32_names(model)}
    for path, weight in model.named_parameters():
        if path not in kept and not weight.requires_grad and weight.is_floating_point():
            weight.data = weight.data.to(dtype)


class BfloatCopies:
    """Copies that take the place of the float32 parameters of ``models``, except of scalar heads
    and of what the architecture keeps in float32. The frozen weights are bfloat16 already.
    The gradient of a copy is added to its original's when it is complete, and dropped. Buffers
    stay: rotary frequencies would lose what tells far positions apart.

    Raises ValueError for weights that are trained in another type: copies of copies would take the
    gradients and never see an update."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.copy_of: dict[nn.Parameter, nn.Parameter] = {}
        self.stale = True
        """The weights may have changed since they were copied."""
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        """Place of each copy in a module, and the weight that was there."""
        for model in models:
            kept = set(float32_names(model))
            for path, weight in [*model.named_parameters(remove_duplicate=False)]:
                place, _, name = path.rpartition(".")
                module = model.get_submodule(place)
                if path in kept or module is getattr(model, HEAD, None):
                    continue
                if weight.requires_grad and weight.dtype != torch.float32:
                    problem = f"{path} is trained in {weight.dtype}: has it copies already?"
                    raise ValueError(problem)
                if weight.dtype != torch.bfloat16:
                    self._places.append((module, name, weight))
                    module._parameters[name] = self._copy(weight)

    def _copy(self, weight: nn.Parameter) -> nn.Parameter:
        if weight not in self.copy_of:  # tied ones stay tied
            empty = torch.empty_like(weight, dtype=torch.bfloat16)
            copy = self.copy_of[weight] = nn.Parameter(empty, weight.requires_grad)
            if weight.requires_grad:
                copy.register_post_accumulate_grad_hook(partial(_hand_over, weight))
        return self.copy_of[weight]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def refresh(self) -> None:
        if self.stale and self.copy_of:
            torch._foreach_copy_([*self.copy_of.values()], [*self.copy_of])
        self.stale = False

    def take_out(self) -> None:
        """Puts the originals back; the copies are no longer used."""
        for module, name, weight in self._places:
            module._parameters[name] = weight


@contextmanager
def in_bfloat16(model: nn.Module) -> Iterator[None]:
    """Has ``model`` compute inside as one that is trained with copies."""
    copies = BfloatCopies([model])
    copies.refresh()
    try:
        yield
    finally:
        copies.take_out()


def _hand_over(weight: nn.Parameter, copy: nn.Parameter) -> None:
    gradient, copy.grad = copy.grad, None
    if weight.grad is None:
        weight.grad = gradient.float()
    else:
        weight.grad.add_(gradient)
