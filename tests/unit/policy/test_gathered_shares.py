"""Shares that ranks gather are, bit for bit, the buckets of the whole weights."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.weights.weight_manifest import Manifest, WeightShard
from paceline.weights.weight_snapshot import WeightSnapshot, WireDtype
from policy_worker.ranks.gathered_shares import fill_share

SIZES = (1, 2, 3, 4, 7)
BUCKET_BYTES = 1000
PART_BYTES = 600


class Ranks:
    """Ranks in threads, and what each hands to the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._mine: list[Tensor] = [torch.empty(0)] * size
        self._meet = threading.Barrier(size)
        self.largest = 0

    def all_gather(self, rank: int, mine: Tensor) -> Tensor:
        self._mine[rank] = mine
        self._meet.wait(60)
        found = torch.stack(self._mine)
        self.largest = max(self.largest, found.numel())
        self._meet.wait(60)
        return found

    def run(self, work: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                work(rank)
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


def slice_of(tensor: Tensor, rank: int, size: int) -> tuple[Tensor, bool]:
    """As FSDP2 slices it; numbers without a dimension are whole on every rank."""
    if tensor.ndim == 0:
        return tensor, False
    rows = -(-tensor.shape[0] // size)
    return tensor[min(rank * rows, len(tensor)) :][:rows], True


def shares_of(named: dict[str, Tensor], size: int, wire: WireDtype) -> tuple[list[Tensor], Ranks]:
    manifest = Manifest.of(named.items(), bucket_bytes=BUCKET_BYTES, dtype=wire.of)
    shares = [WeightShard(rank, size) for rank in range(size)]
    flats = [torch.zeros(share.size_bytes(manifest), dtype=torch.uint8) for share in shares]
    ranks = Ranks(size)

    def work(rank: int) -> None:
        stored = [slice_of(tensor, rank, size) for tensor in named.values()]
        gather = lambda mine: ranks.all_gather(rank, mine)  # noqa: E731
        fill_share(flats[rank], manifest, shares[rank], stored, gather, PART_BYTES)

    ranks.run(work)
    return flats, ranks


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
    assert 0 < ranks.largest <= PART_BYTES


def test_more_ranks_than_buckets_leave_some_with_nothing() -> None:
    named = {"w": torch.arange(300.0).reshape(100, 3)}
    flats, _ = shares_of(named, 7, WireDtype())
    whole = WeightSnapshot.take(1, named.items(), bucket_bytes=BUCKET_BYTES)
    assert [flat.numel() for flat in flats] == [1000, 216, 0, 0, 0, 0, 0]
    assert torch.equal(torch.cat(flats), whole.flat)
