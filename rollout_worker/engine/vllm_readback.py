"""Are the engine's parameters the trainer's, bit for bit? The memory that weights were loaded into is
read back and compared by checksum.

    each rank:   Readback notes, while vLLM loads ──► memory read back ──► Piece: place, checksum
    front end:   compare(pieces of all ranks, the trainer's tensors) ──► Proof, or Differs

vLLM fuses, shards and pads weights, and does not say what went where; but in the end every loader
copies a view of a weight into a view of a parameter. Those pairs are noted. What kernels keep in a
form of their own (packed, quantised) is read back from the parameter that was packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.digest import checksum


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a weight as a rank has it. ``offset``, ``stride``: in elements of the weight, laid
    out in rows. ``dtype``: the engine's. ``live``: read from a parameter that the model computes
    with; else from what its kernels' own copy was made of."""

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    checksum: str
    live: bool

    def to_wire(self) -> list[Any]:
        where = [self.offset, list(self.size), list(self.stride)]
        return [self.name, *where, self.dtype, self.checksum, self.live]

    @classmethod
    def from_wire(cls, value: Sequence[Any]) -> Self:
        name, offset, size, stride, dtype, found, live = value
        return cls(name, offset, tuple(size), tuple(stride), dtype, found, live)


@dataclass(frozen=True, slots=True)
class Proof:
    """In elements of the trainer's tensors."""

    total: int
    equal: int
    """Read back on one rank at least, and equal wherever they were."""
    live: int
    """Of these, read from parameters that the model computes with."""


class Differs(Exception):
    """A parameter does not hold the weight that was loaded into it."""


class Readback(TorchFunctionMode):
    """While active, notes where each part of ``weights`` is copied to; afterwards ``pieces`` reads
    it. Holds the memory that it will read."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._weights = sorted(
            ((t.data_ptr(), t.nbytes, name) for name, t in weights.items() if t.numel()),
        )
        self._views: dict[tuple[str, int, tuple[int, ...], tuple[int, ...], int], Tensor] = {}
        """By part of a weight and the address it went to: tied parameters get the same weight."""
        self._parameters: dict[int, list[Tensor]] = {}
        """By address of a loaded parameter's memory: where it was copied to as a whole."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.copy_:
            self._note(args[0], args[1])
        elif func is Tensor.__setitem__ and isinstance(args[2], Tensor):
            self._note(args[0][args[1]], args[2])
        return result

    def _note(self, target: Tensor, source: Tensor) -> None:
        # Loads are rehearsed on the meta device, to be counted.
        if "meta" in (target.device.type, source.device.type) or not source.numel():
            return
        if (found := self._weight_at(source.data_ptr())) is not None:
            name, start = found
            source = source.expand(target.shape)
            offset = (source.data_ptr() - start) // source.element_size()
            part = name, offset, tuple(source.shape), source.stride()
            self._views[*part, target.data_ptr()] = target.detach()
        elif source.shape == target.shape and source.stride() == target.stride():
            self._parameters.setdefault(source.data_ptr(), []).append(target.detach())

    def _weight_at(self, address: int) -> tuple[str, int] | None:
        """Its name and the address where it begins."""
        for start, size, name in self._weights:
            if start <= address < start + size:
                return name, start
        return None

    def pieces(self, model: nn.Module) -> list[Piece]:
        """``model``: as it is now, loaded and processed."""
        live = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        found = []
        for (name, offset, size, stride, _), view in self._views.items():
            memory = self._final(view, live)
            dtype = str(memory.dtype).removeprefix("torch.")
            at_work = memory.untyped_storage().data_ptr() in live
            sum_ = checksum(memory.contiguous())
            found.append(Piece(name, offset, size, stride, dtype, sum_, at_work))
        return found

    def _final(self, view: Tensor, live: set[int]) -> Tensor:
        """Where this part of a parameter is now, if that parameter was copied on as a whole."""
        start = view.untyped_storage().data_ptr()
        for moved in self._parameters.get(start, ()):
            if moved.untyped_storage().data_ptr() in live and moved.dtype == view.dtype:
                offset = moved.storage_offset() + view.storage_offset()
                return moved.as_strided(view.shape, view.stride(), offset)
        return view


def compare(ranks: Iterable[Iterable[Piece]], weights: Mapping[str, Tensor]) -> Proof:
    """Raises Differs for the first part that does not match."""
    masks: dict[str, tuple[Tensor, Tensor]] = {}
    expected: dict[tuple[Any, ...], str] = {}
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            weight = weights[piece.name].detach().contiguous()
            place = piece.name, piece.offset, piece.size, piece.stride, piece.dtype
            if place not in expected:
                part = weight.as_strided(
                    piece.size, piece.stride, weight.storage_offset() + piece.offset
                )
                dtype = getattr(torch, piece.dtype)
                expected[place] = checksum(part.to(dtype).contiguous())
            if expected[place] != piece.checksum:
                raise Differs(
                    f"{piece.name} on rank {rank} (part of shape {list(piece.size)} from element "
                    f"{piece.offset})"
                )
            if piece.name not in masks:
                masks[piece.name] = (
                    torch.zeros(weight.numel(), dtype=torch.bool),
                    torch.zeros(weight.numel(), dtype=torch.bool),
                )
            equal, live = masks[piece.name]
            equal.as_strided(piece.size, piece.stride, piece.offset).fill_(True)
            if piece.live:
                live.as_strided(piece.size, piece.stride, piece.offset).fill_(True)
    return Proof(
        total=sum(weight.numel() for weight in weights.values()),
        equal=sum(int(equal.sum()) for equal, _ in masks.values()),
        live=sum(int(live.sum()) for _, live in masks.values()),
    )
