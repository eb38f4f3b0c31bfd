"""Routes: the experts that each token of a mixture of experts goes to.

Engine and trainer round differently, and a router's choice between two nearly equal experts turns
on a rounding. So the engine notes its choices, they travel with the tokens, and the trainer makes
the same ones; the weights of the chosen experts it computes itself, with their gradient. Source:
Ma et al., Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers, arXiv
2510.11370.

Routers differ, but each ends in a ``topk`` over its experts, inside the module that has them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def expert_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that have experts, in the order in which tokens pass them."""
    return [m for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module)]


def experts_of(layer: Any) -> int:
    """How many experts the layer has."""
    return int(getattr(layer.experts, "num_experts", 0) or len(layer.experts))


def routes_width(model: Any) -> int:
    """Experts that a token goes to, over all layers; 0: it has none."""
    config = model.config.get_text_config()
    names = ("num_experts_per_tok", "num_experts_per_token")
    chosen = next((int(k) for name in names if (k := getattr(config, name, None))), 0)
    return len(expert_layers(model)) * chosen


class Router(TorchFunctionMode):  # type: ignore[misc]
    """Inside, the choice of a layer's experts is noted in ``chosen``, int64 [tokens, k]. With
    ``wanted`` [tokens, k] it is made: -1 is left to the router. ``agreement``: share of the wanted
    experts that the router would have taken, and their number, float32 [2]."""

    def __init__(self, layer: nn.Module, wanted: Tensor | None = None) -> None:
        super().__init__()
        self._experts = experts_of(layer)
        self._wanted = wanted
        self.chosen: Tensor | None = None
        self.agreement: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape[-1] != self._experts:
            return found
        if args[0].dim() != 2:  # of a group of experts
            return found
        self.chosen = found.indices
        if self._wanted is None or self._wanted.shape != self.chosen.shape:
            return found
        known = self._wanted >= 0
        taken = (self._wanted[:, :, None] == self.chosen[:, None]).any(-1) & known
        self.agreement = torch.stack([taken.sum(), known.sum()]).float()
        self.chosen = torch.where(known, self._wanted, self.chosen)
        return torch.return_types.topk((args[0].gather(-1, self.chosen), self.chosen))


class RouteNotes:
    """Notes the experts that every layer of ``model`` chooses in a forward."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = expert_layers(model)
        self._chosen: list[Tensor] = []
        for layer in self._layers:
            layer.forward = partial(self._noting, layer, layer.forward)

    def take(self) -> Tensor | None:
        """int64 [tokens, W] of the forwards since the last look; None if no layer has chosen."""
        chosen, self._chosen = self._chosen, []
        return torch.cat(chosen, 1) if chosen else None

    def clear(self) -> None:
        self._chosen = []

    def _noting(
        self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with Router(layer) as router:
            found = forward(*args, **kwargs)
        if router.chosen is not None:
            self._chosen.append(router.chosen)
        return found
