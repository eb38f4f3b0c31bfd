"""Check after a weight swap that the quantised layers of vLLM hold the weights that were received.

    received ──► parameter, as vLLM's loader filled it ──► quantised, in the form of the kernel
             compared here, bit by bit ▲      its columns, as the kernel multiplies by them ▲

A kernel keeps numbers and scales in a form of its own. A vector of one 1 and zeros, which every
kernel quantises exactly, makes it say what it holds: a column of the weight. Each may differ from
what was received by half a step of its type and no more.

Experts, and types of less than 8 bits, are compared before they are quantised, not afterwards.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from rollout_worker.engine.parameters import differing
from rollout_worker.engine.vllm.rank_weights import Place, RankWeights
from rollout_worker.engine.vllm.readback import Readback

COLUMNS = 16
"""Columns of each layer that are read after a swap, others each time."""
_STEPS = {torch.float8_e4m3fn: (2**-4, 2**-14), torch.int8: (0.0, 1 / 127)}
"""How far a number may be off: half a step of its type, as a share of the number; and near zero,
as a share of the largest one. (A kernel that reads subnormal numbers as others is off by the least
normal one there, and scales that are powers of two are up to twice as large.)"""


class Weight(NamedTuple):
    """A layer's weight as it was filled, [rows, width]."""

    width: int
    dtype: torch.dtype
    parts: dict[Place, tuple[int, int, torch.Size]]
    """Row, column and size of each part of a received weight that was copied there."""


@dataclass
class QuantisedLayers:
    """Comparison of one swap on one rank. ``complete``: numbers are compared before they are
    quantised, all of them; otherwise a sample."""

    notes: Readback
    weights: RankWeights
    complete: bool
    wrong: list[str] = field(default_factory=list)
    """Weights that a layer was not given as they were received."""
    _filled: dict[nn.Module, Weight] = field(default_factory=dict)

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """While active, layers of ``model`` are looked at just before they are quantised: nothing
        keeps what they were given any longer."""
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        methods: dict[int, Any] = {
            id(method): method
            for layer in model.modules()
            if isinstance(method := getattr(layer, "quant_method", None), QuantizeMethodBase)
            and not type(method).__name__.startswith("Unquantized")
        }
        for method in methods.values():
            method.process_weights_after_loading = self._quantise(method)
        try:
            yield
        finally:
            for method in methods.values():
                del method.process_weights_after_loading

    def _quantise(self, method: Any) -> Callable[[nn.Module], None]:
        quantise = method.process_weights_after_loading

        def compare_and_quantise(layer: nn.Module) -> None:
            given = dict(layer.named_parameters(recurse=False))
            # Now: quantising may copy numbers on, and each copy would be followed.
            taken = {name: self.notes.take(parameter) for name, parameter in given.items()}
            for views in taken.values():
                self.wrong += differing(self.weights.parts(views), complete=self.complete)
            quantise(layer)
            weight = given.get("weight")
            if weight is not None and layer.weight.dtype != weight.dtype:
                width = weight.shape[1]
                parts = {
                    key[:4]: (*divmod(view.storage_offset(), width), view.shape)
                    for key, view in taken["weight"].items()
                }
                self._filled[layer] = Weight(width, weight.dtype, parts)

        return compare_and_quantise

    def differing(self) -> list[str]:
        """Names of the weights that a layer does not hold as they were received. After the swap."""
        columns = (name for layer in self._filled for name in self._columns(layer))
        return list(dict.fromkeys([*self.wrong, *columns]))

    def _columns(self, layer: Any) -> Iterator[str]:
        width, dtype, parts = self._filled[layer]
        # Of a kernel's own form the dtype says nothing.
        key = getattr(layer.quant_method, "weight_quant_key", None)
        if (kind := layer.weight.dtype if key is None else key.dtype) not in _STEPS:
            return
        device = layer.weight.device
        chosen = torch.tensor(random.sample(range(width), min(width, COLUMNS)), device=device)
        asked = torch.zeros(len(chosen), width, dtype=dtype, device=device)
        held = layer.quant_method.apply(layer, asked.scatter_(1, chosen[:, None], 1), None).float()
        share, floor = _STEPS[kind]
        share += torch.finfo(dtype).eps  # the product is rounded to the type of what it is given
        sources = {place: self.weights.part(place).reshape(at[2]) for place, at in parts.items()}
        # Several weights in one layer may have one scale.
        floor *= max((float(source.abs().max()) for source in sources.values()), default=0.0)
        for place, (row, column, size) in parts.items():
            source = sources[place]
            inside = (chosen >= column) & (chosen < column + size[1])
            sent = source[:, (chosen[inside] - column).to(source.device)].T.to(device).float()
            far = (held[inside, row : row + size[0]] - sent).abs() - share * sent.abs()
            if not (far <= floor).all():
                yield place[0]
