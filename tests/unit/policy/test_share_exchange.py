"""Shares that ranks exchange are, bit for bit, the buckets of the whole weights."""

import json
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.weights.weight_manifest import Manifest, WeightShard
from paceline.weights.weight_snapshot import WeightSnapshot, WireDtype
from policy_worker.ranks.share_exchange import Extent, ShareExchange

SIZES = (1, 2, 3, 4, 7)
BUCKET_BYTES = 1000


class Ranks:
    """Ranks in threads, and what each hands to the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._sent: list[list[Tensor]] = [[] for _ in range(size)]
        self._meet = threading.Barrier(size)
        self.largest = 0

    def all_to_all(
        self,
        rank: int,
        received: Tensor,
        sent: Tensor,
        sizes_from: Sequence[int],
        sizes_to: Sequence[int],
    ) -> None:
        self.largest = max(self.largest, received.numel() + sent.numel())
        self._sent[rank] = list(sent.split(list(sizes_to)))
        self._meet.wait(60)
        parts = [self._sent[other][rank] for other in range(self.size)]
        assert [part.numel() for part in parts] == list(sizes_from)
        received.copy_(torch.cat(parts))
        self._meet.wait(60)

    def run(self, work: object) -> None:
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                work(rank)  # type: ignore[operator]
            except BaseException as error:
                errors.append(error)
                self._meet.abort()

        threads = [threading.Thread(target=one, args=[rank]) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    embed = torch.randn(64, 33, generator=generator)
    return {
        "embed": embed,
        "norm": torch.randn(33, generator=generator),
        "router": torch.randn(5, 3, generator=generator),
        "one": torch.randn(1, 40, generator=generator),
        "steps": torch.tensor(7),
        "none": torch.empty(0, 5),
        "head": torch.randn(129, 17, generator=generator),
        "tied": embed,
        "half": torch.randn(50, 3, generator=generator).bfloat16(),
    }


def slice_of(tensor: Tensor, rank: int, size: int) -> tuple[Tensor, Extent]:
    """As FSDP2 slices it; numbers without a dimension are whole on every rank."""
    if tensor.ndim == 0:
        return tensor.reshape(-1), (0, 1)
    rows = -(-tensor.shape[0] // size)
    first = min(rank * rows, tensor.shape[0])
    local = tensor[first : first + rows]
    row = tensor.shape[1:].numel()
    return local.reshape(-1), (first * row, local.numel()) if local.numel() else (0, 0)


def shares_of(named: dict[str, Tensor], size: int, wire: WireDtype) -> tuple[list[Tensor], Ranks]:
    manifest = Manifest.of(named.items(), bucket_bytes=BUCKET_BYTES, dtype=wire.of)
    sliced = [[slice_of(t, rank, size) for t in named.values()] for rank in range(size)]
    # As the ranks get them from one another.
    extents = json.loads(json.dumps([[extent for _, extent in row] for row in sliced]))
    flats = [
        torch.zeros(WeightShard(rank, size).size_bytes(manifest), dtype=torch.uint8)
        for rank in range(size)
    ]
    ranks = Ranks(size)

    def work(rank: int) -> None:
        exchange = ShareExchange(manifest, WeightShard(rank, size), extents)
        exchange.fill(flats[rank], [local for local, _ in sliced[rank]], _of(ranks, rank))

    ranks.run(work)
    return flats, ranks


def _of(ranks: Ranks, rank: int):  # type: ignore[no-untyped-def]
    return lambda *arguments: ranks.all_to_all(rank, *arguments)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wire", [WireDtype(), WireDtype(torch.bfloat16, {"router"})])
def test_shares_are_the_buckets_of_the_whole(size: int, wire: WireDtype) -> None:
    named = weights()
    whole = WeightSnapshot.take(1, named.items(), bucket_bytes=BUCKET_BYTES, wire=wire)
    assert [spec.same_as for spec in whole.manifest.specs if spec.name == "tied"] == ["embed"]
    flats, ranks = shares_of(named, size, wire)
    held = []
    for rank, flat in enumerate(flats):
        share = WeightShard(rank, size)
        for index in share.buckets(whole.manifest):
            held.append(index)
            assert torch.equal(share.bucket(whole.manifest, flat, index), whole.bucket(index))
    assert sorted(held) == list(range(whole.manifest.buckets))
    assert sum(flat.numel() for flat in flats) == whole.manifest.total_bytes
    assert ranks.largest <= 2 * BUCKET_BYTES + 64 * size


def test_more_ranks_than_buckets_leave_some_with_nothing() -> None:
    named = {"w": torch.arange(300.0).reshape(100, 3)}
    flats, _ = shares_of(named, 7, WireDtype())
    whole = WeightSnapshot.take(1, named.items(), bucket_bytes=BUCKET_BYTES)
    assert [flat.numel() for flat in flats] == [1000, 216, 0, 0, 0, 0, 0]
    assert torch.equal(torch.cat(flats), whole.flat)


@pytest.mark.parametrize("extents", [[(0, 5), (6, 4)], [(0, 6), (5, 5)], [(0, 5), (5, 4)]])
def test_slices_that_are_not_exactly_the_weight_are_refused(extents: list[Extent]) -> None:
    manifest = Manifest.of([("w", torch.ones(10))], bucket_bytes=64)
    with pytest.raises(ValueError, match="slices of w leave a gap or overlap"):
        ShareExchange(manifest, WeightShard(0, 2), [[extent] for extent in extents])


def test_buckets_that_cut_through_elements_are_refused() -> None:
    manifest = Manifest.of([("w", torch.ones(10))], bucket_bytes=100)
    with pytest.raises(ValueError, match="no multiple of 8"):
        ShareExchange(manifest, WeightShard(), [[(0, 10)]])
