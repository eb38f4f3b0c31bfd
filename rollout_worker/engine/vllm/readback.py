"""Are the engine's parameters the trainer's, bit for bit? The memory that weights were loaded into is
read back and compared by checksum.

    each rank:   Readback notes, while vLLM loads ──► memory read back ──► Piece: place, checksum
    front end:   compare(pieces of all ranks, the trainer's tensors) ──► Proof, or Differs

vLLM fuses, shards and pads weights, and does not say what went where; but in the end every loader
copies a view of a weight into a view of a parameter. Those pairs are noted. What kernels keep in a
form of their own (packed, quantised) is read back from the parameter that was packed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.weights.tensor_checksum import checksum, weights_digest


@dataclass(frozen=True, slots=True)
class ParameterSlice:
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
        self._starts = [start for start, _, _ in self._weights]
        self._views: dict[tuple[str, int, tuple[int, ...], tuple[int, ...], int], Tensor] = {}
        """By part of a weight and the address it went to: tied parameters get the same weight."""

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
        elif _alike(source, target):
            self._follow(source.detach(), target.detach())

    def _weight_at(self, address: int) -> tuple[str, int] | None:
        """Its name and the address where it begins."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        start, size, name = self._weights[place]
        return (name, start) if address < start + size else None

    def _follow(self, source: Tensor, target: Tensor) -> None:
        """A parameter that was loaded is copied, as a whole, into the one that kernels use."""
        storage = source.untyped_storage().data_ptr()
        for key, view in list(self._views.items()):
            if view.untyped_storage().data_ptr() == storage and view.dtype == target.dtype:
                offset = view.storage_offset() - source.storage_offset() + target.storage_offset()
                del self._views[key]
                moved = target.as_strided(view.shape, view.stride(), offset)
                self._views[*key[:4], moved.data_ptr()] = moved

    def pieces(self, model: nn.Module) -> list[ParameterSlice]:
        """``model``: as it is now, loaded and processed."""
        live = _storages(model)
        found = []
        for (name, offset, size, stride, _), memory in self._views.items():
            dtype = str(memory.dtype).removeprefix("torch.")
            at_work = memory.untyped_storage().data_ptr() in live
            sum_ = checksum(memory.contiguous())
            found.append(ParameterSlice(name, offset, size, stride, dtype, sum_, at_work))
        return found

    def plan(self, model: nn.Module, loaded: Iterable[str]) -> CopyPlan | None:
        """How to load the next version by copies alone; None where loading is more than that.

        It is copies alone if everything noted went into parameters in use, and what was not written
        is zero (padding) or belongs to parameters that are not in ``loaded``.
        """
        live, loaded = _storages(model), set(loaded)
        masks: dict[int, Tensor] = {}
        for memory in self._views.values():
            storage_at = memory.untyped_storage().data_ptr()
            if storage_at not in live:
                return None
            mask = masks.setdefault(storage_at, _mask_of(memory))
            mask.as_strided(memory.shape, memory.stride(), memory.storage_offset()).fill_(False)
        for name, parameter in model.named_parameters():
            unwritten = masks.get(parameter.untyped_storage().data_ptr())
            if unwritten is None:
                if name in loaded:
                    return None
                continue
            rest = unwritten.as_strided(
                parameter.shape, parameter.stride(), parameter.storage_offset()
            )
            if bool(parameter.detach()[rest].count_nonzero()):
                return None
        return CopyPlan([(*key[:4], memory) for key, memory in self._views.items()])


class CopyPlan:
    """``moves``: name, offset, size and stride of a part of a weight, and the memory it belongs in."""

    def __init__(
        self, moves: Sequence[tuple[str, int, tuple[int, ...], tuple[int, ...], Tensor]]
    ) -> None:
        self._moves = moves
        self._memory = [memory for *_, memory in moves]

    def reproduces(self, model: nn.Module, weights: Mapping[str, Tensor]) -> bool:
        """Whether it makes of ``weights`` what the loaders have just made of them, bit for bit. If not,
        the model is left undefined."""
        expected = weights_digest(model.named_parameters())
        for memory in self._memory:
            memory.fill_(float("nan"))
        self.apply(weights)
        return bool(weights_digest(model.named_parameters()) == expected)

    def apply(self, weights: Mapping[str, Tensor]) -> None:
        """``weights``: of the names and shapes it was made for, laid out in rows."""
        parts = []
        for name, offset, size, stride, _ in self._moves:
            start = weights[name].storage_offset() + offset
            parts.append(weights[name].as_strided(size, stride, start))
        torch._foreach_copy_(self._memory, parts, non_blocking=True)


def _alike(one: Tensor, other: Tensor) -> bool:
    return bool(one.shape == other.shape and one.stride() == other.stride())


def _storages(model: nn.Module) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}


def _mask_of(memory: Tensor) -> Tensor:
    """True for each element of the storage."""
    count = memory.untyped_storage().nbytes() // memory.element_size()
    return torch.ones(count, dtype=torch.bool, device=memory.device)


def compare(ranks: Iterable[Iterable[ParameterSlice]], weights: Mapping[str, Tensor]) -> Proof:
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
