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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.expert_routes import Router, expert_layers
from paceline.payloads.routes import BadRoutes
from policy_worker.model.row_layout import Packing


def tell_layers(model: nn.Module) -> None:
    """Has the recurrent layers of ``model`` compute each sequence of a packed row by itself, and
    those with experts follow the row's routes, in place. A batch without packing goes through them
    as before."""
    recurrent = [m for m in model.modules() if any(isinstance(c, nn.Conv1d) for c in m.children())]
    experts = expert_layers(model)
    if not recurrent and not experts:
        return
    row = _Row()
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    base.register_forward_pre_hook(row.take, with_kwargs=True)
    for layer in recurrent:
        layer.forward = partial(_by_sequence, layer.forward, row)
    for number, layer in enumerate(experts):
        layer.forward = partial(_by_routes, layer, layer.forward, row, number, len(experts))


class _Row:
    """The row that the model computes, or has computed last: a checkpointed block runs again in the
    backward pass, which precedes the model's next row."""

    packing: Packing | None = None

    def take(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.packing = kwargs.get("packing")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_sequence(
    forward: Callable[..., Tensor], row: _Row, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """[1, T, D] -> [1, T, D] of a row, by the layer's own ``forward`` over [N, L, D]."""
    if row.packing is None:
        return forward(hidden_states, *args, **kwargs)
    blocks, collapse = row.packing.blocks
    outputs = []
    for block in blocks:
        grid = hidden_states[0].index_select(0, block.gather)
        out = forward(grid.view(block.sequences, block.length, -1))
        outputs.append(out.reshape(block.sequences * block.length, -1))
    return torch.cat(outputs).index_select(0, collapse).unsqueeze(0)


def _by_routes(
    layer: nn.Module,
    forward: Callable[..., Any],
    row: _Row,
    number: int,
    layers: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``forward`` of the layer ``number`` of ``layers`` with experts. Raises BadRoutes if the
    row's routes are of another model."""
    packing = row.packing
    if packing is None or packing.routes is None:
        return forward(*args, **kwargs)
    if packing.routes.shape[1] % layers:
        width = packing.routes.shape[1]
        raise BadRoutes(f"tokens have {width} experts, and the model has {layers} layers of them")
    wanted = packing.routes.view(len(packing.routes), layers, -1)[:, number]
    with Router(layer, wanted) as router:
        found = forward(*args, **kwargs)
    if router.agreement is not None and len(packing.agreement) < layers:
        packing.agreement.append(router.agreement)
    return found
