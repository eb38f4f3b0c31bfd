"""Shares from slices: each rank of a replica stores slices of every weight, and publishes whole
buckets.

    rank 0: slices ─┐                              ┌─► rank 0: buckets 0, n, 2n, ...
    rank 1: slices ─┴─ all-gather, part by part ───┴─► rank 1: buckets 1, n + 1, ...

A part is cast to the type in which it travels before it is gathered. Beyond its slices and its
share a rank holds one part of one weight, and its own piece of that.
"""

from collections.abc import Callable, Iterable
from math import prod

import torch
from torch import Tensor

from paceline.weights.weight_manifest import DTYPES, Manifest, WeightShard

AllGather = Callable[[Tensor], Tensor]
"""uint8 [n] of each rank -> [ranks, n], on every rank."""
PART_BYTES = 64 << 20
"""Bytes of a weight that the ranks gather at once, about."""


def fill_share(
    flat: Tensor,
    manifest: Manifest,
    share: WeightShard,
    weights: Iterable[tuple[Tensor, bool]],
    all_gather: AllGather,
    part_bytes: int = PART_BYTES,
) -> None:
    """Writes this rank's share, in the manifest's types, to uint8 ``flat``. ``weights``, in the
    manifest's order: what this rank stores of each, and True if that is a slice. Rows are sliced as
    FSDP2 does it: equally many on each rank, of which the last ranks may lack some. All ranks call
    it, with the same manifest."""
    for spec, at, (stored, sliced) in zip(manifest.specs, manifest.offsets, weights, strict=True):
        if spec.same_as:
            continue
        dtype, mine = DTYPES[spec.dtype], stored.reshape(-1)
        if not sliced:
            share.put(manifest, flat, at, mine.to(dtype).view(torch.uint8))
            continue
        slice_of_rank = -(-spec.shape[0] // share.sources) * prod(spec.shape[1:])
        step = max(1, part_bytes // share.sources // dtype.itemsize)
        for first in range(0, slice_of_rank, step):
            here = mine[first : first + step]
            padded = mine.new_zeros(min(step, slice_of_rank - first), dtype=dtype)
            padded[: len(here)] = here
            for rank, part in enumerate(all_gather(padded.view(torch.uint8))):
                start = (rank * slice_of_rank + first) * dtype.itemsize
                there = max(0, min(len(part), spec.size_bytes - start))
                share.put(manifest, flat, at + start, part[:there])
