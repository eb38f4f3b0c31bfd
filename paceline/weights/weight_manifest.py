"""Weight manifest: the tensors of a set of weights, and their layout in one flat buffer.

Both ends compute the layout from the manifest by the same rule, so no offset ever comes from a
message. A manifest from a message is checked in full before anything is allocated for it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int8", "int16", "int32", "int64", "uint8", "bool"),
    )
}

_ALIGNMENT = 64
_MAX_TENSORS = 200_000
_MAX_NAME = 512
_MAX_DIMS = 16


class WeightsRefused(Exception):
    """A transfer over a weights link that is malformed, damaged, too large or too old."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]
    same_as: str = ""
    """Name of an earlier tensor that this one shares its memory with (tied weights)."""

    @property
    def size_bytes(self) -> int:
        return 0 if self.same_as else math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    specs: tuple[TensorSpec, ...]
    bucket_bytes: int

    @classmethod
    def of(
        cls,
        named: Iterable[tuple[str, Tensor]],
        *,
        bucket_bytes: int,
        dtype: Callable[[str, Tensor], torch.dtype] = lambda name, tensor: tensor.dtype,
    ) -> "Manifest":
        """Describes tensors; one that is the same view of memory as an earlier one is tied to it,
        except on the meta device, which has none. ``dtype``: the type in which a tensor of this
        name travels."""
        specs: dict[str, TensorSpec] = {}
        seen: dict[tuple[Any, ...], str] = {}
        for name, tensor in named:
            if name in specs:
                raise ValueError(f"two weights are named {name!r}")
            sent_as = str(dtype(name, tensor)).removeprefix("torch.")
            if sent_as not in DTYPES:
                raise ValueError(f"weight {name!r} has dtype {sent_as}, which is not sent")
            shape = tuple(tensor.shape)
            identity = (tensor.data_ptr(), tensor.device, sent_as, shape, tensor.stride())
            shared = tensor.numel() > 0 and not tensor.is_meta
            first = seen.setdefault(identity, name) if shared else name
            specs[name] = TensorSpec(name, sent_as, shape, "" if first == name else first)
        return cls(tuple(specs.values()), bucket_bytes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each tensor, in bytes; a tied tensor starts where its twin does."""
        at: dict[str, int] = {}
        ends = 0
        for spec in self.specs:
            if spec.same_as:
                at[spec.name] = at[spec.same_as]
            else:
                at[spec.name] = ends
                ends += -(-spec.size_bytes // _ALIGNMENT) * _ALIGNMENT
        return tuple(at.values())

    @cached_property
    def total_bytes(self) -> int:
        """Size of the flat buffer, padding included."""
        return sum(-(-spec.size_bytes // _ALIGNMENT) * _ALIGNMENT for spec in self.specs)

    @cached_property
    def may_be_sparse(self) -> bool:
        """A step may change few words: most bytes are of 16-bit types. Of float32 all change."""
        short = sum(spec.size_bytes for spec in self.specs if DTYPES[spec.dtype].itemsize == 2)
        return 2 * short > self.total_bytes

    @property
    def buckets(self) -> int:
        return -(-self.total_bytes // self.bucket_bytes)

    def bucket(self, flat: Tensor, index: int) -> Tensor:
        """The ``index``-th piece of uint8[total_bytes] ``flat``: a view."""
        return flat[index * self.bucket_bytes : (index + 1) * self.bucket_bytes]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors inside ``flat``; tied ones are the same object."""
        found: dict[str, Tensor] = {}
        for spec, start in zip(self.specs, self.offsets, strict=True):
            if spec.same_as:
                found[spec.name] = found[spec.same_as]
            else:
                part = flat[start : start + spec.size_bytes]
                found[spec.name] = part.view(DTYPES[spec.dtype]).view(spec.shape)
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "bucket_bytes": self.bucket_bytes,
            "tensors": [[s.name, s.dtype, list(s.shape), s.same_as] for s in self.specs],
        }

    @classmethod
    def from_json(cls, value: Any, *, limit_bytes: int) -> "Manifest":
        """Checks everything; raises WeightsRefused. ``limit_bytes``: largest buffer to accept."""
        _require(isinstance(value, dict), "the manifest is not an object")
        bucket_bytes, rows = value.get("bucket_bytes"), value.get("tensors")
        _require(
            is_count(bucket_bytes) and _ALIGNMENT <= bucket_bytes <= 1 << 31,
            "bucket_bytes is out of range",
        )
        _require(isinstance(rows, list) and len(rows) <= _MAX_TENSORS, "too many tensors")
        specs: dict[str, TensorSpec] = {}
        total = 0
        for row in rows:
            spec = _spec(row)
            _require(spec.name not in specs, f"two tensors are named {spec.name!r}")
            if spec.same_as:
                other = specs.get(spec.same_as)
                _require(
                    other is not None
                    and not other.same_as
                    and (other.dtype, other.shape) == (spec.dtype, spec.shape),
                    f"{spec.name!r} is tied to something else than an equal, earlier tensor",
                )
            specs[spec.name] = spec
            total += spec.size_bytes + _ALIGNMENT
            _require(total <= limit_bytes, f"more than the limit of {limit_bytes} bytes")
        return cls(tuple(specs.values()), bucket_bytes)


def _spec(row: Any) -> TensorSpec:
    _require(isinstance(row, list) and len(row) == 4, "a tensor is not described by four fields")
    name, dtype, shape, same_as = row
    _require(isinstance(name, str) and 0 < len(name) <= _MAX_NAME, "a tensor has no proper name")
    _require(isinstance(dtype, str) and dtype in DTYPES, f"{name!r} has an unknown dtype")
    _require(
        isinstance(shape, list) and len(shape) <= _MAX_DIMS and all(is_count(n) for n in shape),
        f"{name!r} has an impossible shape",
    )
    _require(isinstance(same_as, str), f"{name!r} is tied to no name")
    return TensorSpec(name, dtype, tuple(shape), same_as)


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise WeightsRefused(message)


@dataclass(frozen=True, slots=True)
class WeightShard:
    """Buckets that one source of a set of weights holds and sends: of n sources, source k has every
    n-th bucket, from bucket k on. A replica of one rank, and a relay, are the only source."""

    source: int = 0
    sources: int = 1

    def buckets(self, manifest: Manifest) -> range:
        """Indices of its buckets, in rising order."""
        return range(self.source, manifest.buckets, self.sources)

    def size_bytes(self, manifest: Manifest) -> int:
        mine = self.buckets(manifest)
        if not mine:
            return 0
        last = min(manifest.total_bytes, (mine[-1] + 1) * manifest.bucket_bytes)
        return (len(mine) - 1) * manifest.bucket_bytes + last - mine[-1] * manifest.bucket_bytes

    def place(self, manifest: Manifest, index: int) -> int:
        """Offset of bucket ``index`` in a buffer with the share's buckets one after the other."""
        return index // self.sources * manifest.bucket_bytes

    def bucket(self, manifest: Manifest, flat: Tensor, index: int) -> Tensor:
        """The bucket inside uint8[size_bytes] ``flat``: a view."""
        if index not in self.buckets(manifest):
            raise IndexError(f"source {self.source} of {self.sources} does not hold bucket {index}")
        start = self.place(manifest, index)
        return flat[start : start + manifest.bucket_bytes]

    def put(self, manifest: Manifest, flat: Tensor, at: int, part: Tensor) -> None:
        """Writes what the share has of uint8 ``part``, which is from byte ``at`` on in the buffer
        of all weights, to uint8[size_bytes] ``flat``."""
        size, end = manifest.bucket_bytes, at + len(part)
        for index in range(at // size, -(-end // size)):
            if index % self.sources == self.source:
                begin, stop = max(at, index * size), min(end, (index + 1) * size)
                to = self.place(manifest, index) + begin - index * size
                source = part[begin - at : stop - at]
                flat[to : to + len(source)].copy_(source, non_blocking=True)


WHOLE_SHARE = WeightShard()
