"""Parameters of an engine: the places of weights by name, and the comparison with what was loaded.

After every swap, before the first token of the new version, the parity guard compares:

    sampled    SAMPLE elements of every weight, others each time
    complete   every element: the first version, and then each COMPLETE_EVERY-th

A weight that a swap leaves out keeps its old bits. If a share p of its elements has changed, at
random places, a sample misses it with the probability (1 - p) ** SAMPLE: 2 % for p = 0.1 %, nothing
for p = 1 %. If a share p of whole rows has changed, with (1 - p) ** (SAMPLE / _LAST): 60 % and 0.6
%. Each worker and each swap draws its own places, so neither is missed for long. The sample of a
70B model (723 weights, bf16) is 6 MB; a complete comparison reads each rank's share of the weights,
at memory speed.

A sample is a lattice: a view with strides, which is read without an index. It spreads over as many
rows as it can, because a step may change few of them (embeddings of tokens that occurred); its
offset is random.
"""

import functools
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.lora import adapters_of
from rollout_worker.engine.base import WeightMismatch, some

SAMPLE = 4096  # Elements of a weight that a sampled comparison reads, about
COMPLETE_EVERY = 50  # Swaps from one complete comparison to the next
WHOLE = 4 * SAMPLE  # A weight of at most so many elements is always read whole: that costs no more
_LAST = 8  # Elements of a row that a sample reads
_PIECE_BYTES = 64 << 20
"""A complete comparison converts at most this much at a time, to spare memory."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NONE = torch.empty(0, dtype=torch.bool)
_places = random.Random()  # Not the shared generator: an engine seeds that alike in every worker


class ParameterPart(NamedTuple):
    """A weight, or a part of it, and the memory of the engine that it was copied to: same shape,
    any strides, dtypes and devices."""

    name: str
    memory: Tensor
    source: Tensor


class WeightTable:
    """The model's parameters and buffers by name; of a model with adapters these alone. Tied
    parameters have several names."""

    def __init__(self, model: nn.Module) -> None:
        parameters = adapters_of(model)
        self._by_name: Mapping[str, Tensor] = parameters
        if not parameters:
            parameters = dict(model.named_parameters(remove_duplicate=False))
            self._by_name = model.state_dict(keep_vars=True) | parameters
        self._buffers = self._by_name.keys() - parameters.keys()
        self._names: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            self._names.setdefault(id(parameter), []).append(name)

    @property
    def names(self) -> Collection[str]:
        return self._by_name.keys()

    def canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The staged tensors, tied ones once, under their first name. Raises WeightMismatch."""
        unknown = [name for name in tensors if name not in self._by_name]
        if unknown:
            raise WeightMismatch(f"weights unknown to the model: {some(unknown)}")
        missing = [
            names[0] for names in self._names.values() if not any(n in tensors for n in names)
        ]
        if missing:
            raise WeightMismatch(f"weights missing: {some(missing)}")
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


def differing(parts: Iterable[ParameterPart], *, complete: bool) -> list[str]:
    """Names of the weights that differ from their memory in a bit, once converted to its dtype."""
    names, same = [], []
    # The same lattice for weights of one shape: it takes longer to make than to read.
    lattice = functools.cache(_lattice)
    for part in parts:
        shape = part.source.shape
        whole = complete or shape.numel() <= WHOLE
        sample = () if whole else lattice(shape)
        for memory, source in (
            _pieces(part) if whole else [(part.memory[sample], part.source[sample])]
        ):
            expected = source.detach().to(memory.device, memory.dtype)
            names.append(part.name)
            same.append(_bits(memory.detach()).eq(_bits(expected)).all().reshape(1))
    devices = {flag.device for flag in same}
    # One wait for each device, instead of one for each weight.
    flags = torch.cat(same) if len(devices) == 1 else torch.cat([f.cpu() for f in same] or [_NONE])
    return list(dict.fromkeys(n for n, ok in zip(names, flags.tolist(), strict=True) if not ok))


def _lattice(shape: Sequence[int]) -> tuple[slice, ...]:
    """About SAMPLE places: in each dimension at equal distances, from a random one on."""
    slices, left = [], SAMPLE
    for number, size in enumerate(shape):
        last = number == len(shape) - 1
        count = max(1, min(size, left if last else left // min(_LAST, shape[-1])))
        left, step = max(1, left // count), size // count
        start = _places.randrange(size - (count - 1) * step)
        slices.append(slice(start, start + (count - 1) * step + 1, step))
    return tuple(slices)


def _pieces(part: ParameterPart) -> Iterator[tuple[Tensor, Tensor]]:
    memory, source = part.memory, part.source
    if not source.numel() or not source.dim():
        yield memory, source
        return
    rows = max(1, _PIECE_BYTES * len(source) // (source.numel() * source.element_size()))
    yield from zip(memory.split(rows), source.split(rows), strict=True)


def _bits(tensor: Tensor) -> Tensor:
    """Not its numbers: a NaN equals no number, and zeros have two forms."""
    return tensor.view(_BITS[tensor.element_size()])
