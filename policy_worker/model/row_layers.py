"""Layers that have to know the row they compute: those with a recurrent state, and experts.

A gated delta rule, a state-space layer or a short convolution hands a state from token to token; in
a row it would hand it from one completion to the next. Here such a layer gets the sequences of the
row as a batch, each with a copy of its prompt, in the blocks that attention uses. Padding sits
after a sequence's tokens, where a causal layer does not look. So a prompt is not shared in these
layers, and is in the attention layers of the same model.

No architecture is listed: what these layers have in common is a convolution over the tokens. A
layer that carries a state in another way is found by ``rows.probe``, and refused.

A layer with experts sends each token to those that the engine chose for it, if the row says so
(``paceline.expert_routes``).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.expert_routes import Router, expert_layers
from paceline.model_head import mix_in
from policy_worker.model.row_layout import Packing


def tell_layers(model: nn.Module) -> None:
    """Has the recurrent layers of ``model`` compute each sequence of a packed row by itself, and
    those with experts follow the row's routes, in place. A batch without packing goes through them
    as before."""
    recurrent = [m for m in model.modules() if any(isinstance(c, nn.Conv1d) for c in m.children())]
    experts = expert_layers(model)
    if not recurrent and not experts:
        return
    row = _Row(len(experts))
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    base.register_forward_pre_hook(row.take, with_kwargs=True)
    for layer in recurrent:
        _tell(layer, _BySequence, row)
    for number, layer in enumerate(experts):
        _tell(layer, _ByRoutes, row, number)


class _Row:
    """The row that the model computes, or has computed last: a checkpointed block runs again in the
    backward pass, which precedes the model's next row. ``layers``: those with experts."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.packing: Packing | None = None
        self.routes: Tensor | None = None

    def take(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.packing = packing = kwargs.get("packing")
        self.routes = packing.routes if packing is not None and packing.follows else None


def _tell(layer: Any, kind: type, row: _Row, number: int = 0) -> None:
    mix_in(kind, layer)
    layer._row, layer._number = row, number


class _BySequence:
    _row: _Row

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        forward = super().forward  # type: ignore[misc]
        if self._row.packing is None:
            found: Tensor = forward(hidden_states, *args, **kwargs)
            return found
        return _by_sequence(forward, self._row.packing, hidden_states)


class _ByRoutes:
    _row: _Row
    _number: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        if self._row.routes is None:
            return forward(*args, **kwargs)
        return _by_routes(self, forward, *args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_sequence(forward: Callable[..., Tensor], packing: Packing, hidden_states: Tensor) -> Tensor:
    """[1, T, D] -> [1, T, D] of a row, by the layer's own ``forward`` over [N, L, D]."""
    blocks, collapse = packing.blocks
    outputs = []
    for block in blocks:
        grid = hidden_states[0].index_select(0, block.gather)
        out = forward(grid.view(block.sequences, block.length, -1))
        outputs.append(out.reshape(block.sequences * block.length, -1))
    return torch.cat(outputs).index_select(0, collapse).unsqueeze(0)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_routes(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    row: Any = layer._row
    wanted = row.routes.view(len(row.routes), row.layers, -1)[:, layer._number]
    with Router(layer, wanted) as router:
        found = forward(*args, **kwargs)
    agreement = row.packing.agreement
    if router.agreement is not None and len(agreement) < row.layers:
        agreement.append(router.agreement)
    return found
