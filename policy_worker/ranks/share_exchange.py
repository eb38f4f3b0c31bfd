"""Exchange of slices for shares: each rank of a replica stores slices of every weight, and
publishes whole buckets.

    rank 0: slices ─┐                             ┌─► rank 0: buckets 0, n, 2n, ...
    rank 1: slices ─┴─ all-to-all, part by part ──┴─► rank 1: buckets 1, n + 1, ...

- A slice is a run of elements of the flattened weight, so both sides know what goes where from the
  layout alone.
- Weights are cast to the type in which they travel before they are sent, and only to the rank that
  keeps them.
- A round moves one n-th of a bucket to each of n ranks. So a rank holds, beyond its slices and its
  share, what it sends in a round (one bucket at most) and what it receives (one n-th).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.weights.weight_manifest import DTYPES, Manifest, WeightShard

Extent = tuple[int, int]
"""First element of a slice in the flattened weight, and number of elements."""
AllToAll = Callable[[Tensor, Tensor, Sequence[int], Sequence[int]], None]
"""Fills the first uint8 buffer with what the ranks send to this one, in their order, and sends the
second, in the order of the ranks that it is for. Then the sizes of both, by rank."""

_ALIGNMENT = 8
"""Alignment of pieces in a round's buffers, which are seen as elements of any type."""
_PART_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of elements of one weight that one rank stores and one keeps."""

    weight: int
    first: int
    """The first element in the flattened weight."""
    elements: int
    size: int
    """In bytes."""
    to: int
    """Byte in the share of the rank that keeps it."""
    at: int = 0
    """Byte in the buffer of the round: of the sender, or of the rank that keeps it."""


@dataclass(frozen=True, slots=True)
class _Round:
    own: list[_Piece]
    sent: list[_Piece]
    sizes_to: list[int]
    received: list[_Piece]
    sizes_from: list[int]


class ShareExchange:
    """One rank's part. All ranks have the same manifest and extents, and run at the same time."""

    def __init__(
        self, manifest: Manifest, share: WeightShard, extents: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        """``extents``: by rank and by weight, in the order of the manifest. Raises ValueError if
        slices leave a gap or overlap, or if bucket_bytes is no multiple of 8."""
        self.manifest, self.share = manifest, share
        if manifest.bucket_bytes % _ALIGNMENT:
            raise ValueError(f"bucket_bytes = {manifest.bucket_bytes} is no multiple of 8")
        # Those of other ranks come as JSON, which has lists for tuples.
        self._extents: list[list[Extent]] = [
            [(first, count) for first, count in rank] for rank in extents
        ]
        self._everywhere = [self._check(place) for place in range(len(manifest.specs))]
        self._weights = [i for i, spec in enumerate(manifest.specs) if not spec.same_as]
        self._starts = [manifest.offsets[i] for i in self._weights]
        part = -(-manifest.bucket_bytes // share.sources)
        self._part_bytes = -(-part // _PART_ALIGNMENT) * _PART_ALIGNMENT
        self._rounds = [
            self._round(group, start)
            for group in range(-(-manifest.buckets // share.sources))
            for start in range(0, manifest.bucket_bytes, self._part_bytes)
        ]

    def fill(self, flat: Tensor, slices: Sequence[Tensor], all_to_all: AllToAll) -> None:
        """Writes this rank's share, in the manifest's types, to uint8 ``flat``. ``slices``: this
        rank's flattened slice of each weight, in the manifest's order, on the device of
        all_to_all's buffers."""
        device = slices[0].device if slices else flat.device
        out = torch.empty(self._largest("sizes_to"), dtype=torch.uint8, device=device)
        back = torch.empty(self._largest("sizes_from"), dtype=torch.uint8, device=device)
        for work in self._rounds:
            for piece in work.own:
                self._copy(flat, piece.to, piece, slices)
            if self.share.sources == 1:
                continue
            for piece in work.sent:
                self._copy(out, piece.at, piece, slices)
            sent, received = sum(work.sizes_to), sum(work.sizes_from)
            all_to_all(back[:received], out[:sent], work.sizes_from, work.sizes_to)
            for piece in work.received:
                target = flat[piece.to : piece.to + piece.size]
                target.copy_(back[piece.at : piece.at + piece.size], non_blocking=True)

    def _largest(self, sizes: str) -> int:
        return max((sum(getattr(work, sizes)) for work in self._rounds), default=0)

    def _copy(self, buffer: Tensor, at: int, piece: _Piece, slices: Sequence[Tensor]) -> None:
        dtype = DTYPES[self.manifest.specs[piece.weight].dtype]
        start = piece.first - self._extents[self.share.source][piece.weight][0]
        source = slices[piece.weight][start : start + piece.elements]
        buffer[at : at + piece.size].view(dtype).copy_(source, non_blocking=True)

    # -- the plan -----------------------------------------------------------------------------

    def _check(self, weight: int) -> bool:
        """True if every rank stores the whole weight. Raises ValueError for a gap or overlap."""
        spec = self.manifest.specs[weight]
        elements = math.prod(spec.shape)
        found = [extents[weight] for extents in self._extents]
        if all(extent == (0, elements) for extent in found):
            return True
        runs = sorted(extent for extent in found if extent[1])
        ends = [first + count for first, count in runs]
        if [first for first, _ in runs] + [elements] != [0, *ends]:
            raise ValueError(f"slices of {spec.name} leave a gap or overlap: {found}")
        return False

    def _round(self, group: int, part: int) -> _Round:
        """Round of buckets ``group`` × n to ``group`` × n + n - 1, their bytes from ``part`` on."""
        mine, ranks = self.share.source, range(self.share.sources)

        def moved(keeper: int, storer: int) -> list[_Piece]:
            return [] if keeper == storer else self._pieces(group, part, keeper, storer)

        own = self._pieces(group, part, mine, mine)
        sent = _laid_out(moved(rank, mine) for rank in ranks)
        return _Round(own, *sent, *_laid_out(moved(mine, rank) for rank in ranks))

    def _pieces(self, group: int, part: int, keeper: int, storer: int) -> list[_Piece]:
        """Pieces that ``storer`` has and ``keeper`` gets, in the order of the bytes."""
        manifest, keeping = self.manifest, WeightShard(keeper, self.share.sources)
        bucket = group * self.share.sources + keeper
        if bucket >= manifest.buckets:
            return []
        begin = bucket * manifest.bucket_bytes
        start = begin + part
        end = min(start + self._part_bytes, begin + manifest.bucket_bytes, manifest.total_bytes)
        pieces = []
        for place in range(max(0, bisect_right(self._starts, start) - 1), len(self._weights)):
            weight, offset = self._weights[place], self._starts[place]
            if offset >= end:
                break
            if self._everywhere[weight] and storer != keeper:
                continue
            size = int(DTYPES[manifest.specs[weight].dtype].itemsize)
            held_first, held = self._extents[storer][weight]
            first = max(held_first, -(-(start - offset) // size))
            last = min(held_first + held, -(-(end - offset) // size))
            if first < last:
                to = keeping.place(manifest, bucket) + offset + first * size - begin
                pieces.append(_Piece(weight, first, last - first, (last - first) * size, to))
        return pieces


def _laid_out(by_rank: Iterable[list[_Piece]]) -> tuple[list[_Piece], list[int]]:
    """The pieces of all ranks one after the other in a buffer, and the bytes of each rank's."""
    placed: list[_Piece] = []
    sizes, at = [], 0
    for pieces in by_rank:
        begin = at
        for piece in pieces:
            placed.append(replace(piece, at=at))
            at += -(-piece.size // _ALIGNMENT) * _ALIGNMENT
        sizes.append(at - begin)
    return placed, sizes
