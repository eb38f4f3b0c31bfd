"""What arrives is what was published, bit for bit, or nothing arrives."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from paceline.weights.tensor_checksum import weights_digest
from paceline.weights.weight_manifest import WeightsRefused
from paceline.weights.weight_transfer import (
    PUBLISHER,
    RECEIVER,
    SnapshotPool,
    WeightSnapshot,
    acknowledge,
    await_hello,
    receive_snapshot,
    say_hello,
    send_snapshot,
)

CPU = torch.device("cpu")
Pair = tuple[ProcessMesh, ProcessMesh]


@pytest.fixture
def link(url: str, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both ends of a link in this process."""
    ends: dict[int, ProcessMesh] = {}

    def form(rank: int) -> None:
        ends[rank] = ProcessMesh.form(
            url=url,
            key=request.node.name,
            rank=rank,
            size=2,
            device=CPU,
            cancelled=lambda: False,
        )

    threads = [threading.Thread(target=form, args=(rank,)) for rank in (PUBLISHER, RECEIVER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield ends[PUBLISHER], ends[RECEIVER]
    for end in ends.values():
        end.abandon()


class Sending(threading.Thread):
    """Sends in the background; what went wrong is in ``error``."""

    def __init__(self, mesh: ProcessMesh, snapshot: WeightSnapshot) -> None:
        super().__init__(daemon=True)
        self._mesh, self._snapshot = mesh, snapshot
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            send_snapshot(self._mesh, self._snapshot)
        except (MeshError, EpochCancelled, WeightsRefused) as error:
            self.error = error


def odd_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tied = torch.randn(64, 33, generator=generator)
    return {
        "embed": tied,
        "bf16": torch.randn(7, 11, generator=generator).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "transposed": torch.randn(31, 17, generator=generator).t(),
        "strided": torch.randn(40, generator=generator)[::3],
        "expanded": torch.randn(1, 6, generator=generator).expand(5, 6),
        "specials": torch.tensor([float("nan"), float("inf"), -0.0, 1e-42]),
        "flags": torch.tensor([True, False, True]),
        "fp8": torch.randn(9, generator=generator).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "head": tied,
    }


@pytest.mark.parametrize("bucket_bytes", [64, 1000, 4096, 1 << 24])
def test_every_kind_of_tensor_arrives_bit_for_bit(link: Pair, bucket_bytes: int) -> None:
    publisher, receiver = link
    weights = odd_weights()
    sending = Sending(publisher, WeightSnapshot.take(3, weights.items(), bucket_bytes=bucket_bytes))
    staged = receive_snapshot(receiver)
    acknowledge(receiver, staged.version)
    sending.join(timeout=60)
    assert sending.error is None
    assert staged.version == 3
    assert list(staged.tensors) == list(weights)
    for name, tensor in weights.items():
        found = staged.tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert weights_digest([("t", found)]) == weights_digest([("t", tensor)])
    assert staged.tensors["head"] is staged.tensors["embed"]
    assert staged.digest == weights_digest(weights.items())


def test_no_weights_at_all_arrive_too(link: Pair) -> None:
    publisher, receiver = link
    sending = Sending(publisher, WeightSnapshot.take(0, []))
    staged = receive_snapshot(receiver)
    acknowledge(receiver, 0)
    sending.join(timeout=60)
    assert (staged.version, staged.tensors, sending.error) == (0, {}, None)


def test_a_snapshot_does_not_follow_the_trainer() -> None:
    weight = torch.ones(5)
    snapshot = WeightSnapshot.take(1, [("w", weight)])
    weight.zero_()
    assert snapshot.manifest.views(snapshot.flat)["w"].tolist() == [1] * 5


def test_memory_of_a_snapshot_in_use_is_not_taken() -> None:
    pool = SnapshotPool()
    first = WeightSnapshot.take(1, [("w", torch.ones(5))], pool)
    second = WeightSnapshot.take(2, [("w", torch.zeros(5))], pool)
    assert first.flat.data_ptr() != second.flat.data_ptr()
    memory = first.flat.data_ptr()
    del first
    third = WeightSnapshot.take(3, [("w", torch.ones(5))], pool)
    assert third.flat.data_ptr() == memory
    assert third.checksum(0) != second.checksum(0)


def test_a_damaged_bucket_is_refused(link: Pair) -> None:
    publisher, receiver = link
    snapshot = WeightSnapshot.take(1, [("w", torch.ones(5000))], bucket_bytes=4096)
    for i in range(snapshot.manifest.buckets):
        snapshot.checksum(i)
    snapshot.flat[9000] ^= 1
    Sending(publisher, snapshot)
    with pytest.raises(WeightsRefused, match="bucket 2 of version 1 was damaged"):
        receive_snapshot(receiver)


@pytest.mark.parametrize("offered", [4, 5])
def test_a_version_that_is_not_newer_is_refused(link: Pair, offered: int) -> None:
    publisher, receiver = link
    Sending(publisher, WeightSnapshot.take(offered, [("w", torch.ones(5))]))
    with pytest.raises(WeightsRefused, match="is here already"):
        receive_snapshot(receiver, newer_than=5)


def test_more_than_the_limit_is_refused(link: Pair) -> None:
    publisher, receiver = link
    Sending(publisher, WeightSnapshot.take(1, [("w", torch.ones(5000))]))
    with pytest.raises(WeightsRefused, match="more than the limit"):
        receive_snapshot(receiver, limit_bytes=10_000)


@pytest.mark.parametrize("length", [-1, 0, 1 << 40])
def test_a_message_of_absurd_length_is_refused(link: Pair, length: int) -> None:
    publisher, receiver = link
    publisher.send_async(torch.tensor([length], dtype=torch.int64), RECEIVER)
    with pytest.raises(WeightsRefused, match=f"a message of {length} bytes"):
        receive_snapshot(receiver)


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"[1]", b'{"version":"1"}', b'{"version":1}'])
def test_a_message_of_nonsense_is_refused(link: Pair, raw: bytes) -> None:
    publisher, receiver = link
    publisher.send_async(torch.tensor([len(raw)], dtype=torch.int64), RECEIVER)
    publisher.send_async(torch.frombuffer(bytearray(raw), dtype=torch.uint8), RECEIVER)
    with pytest.raises(WeightsRefused):
        receive_snapshot(receiver)


def test_the_receiver_tells_what_it_has(link: Pair) -> None:
    publisher, receiver = link
    speaking = threading.Thread(target=say_hello, args=(receiver, 41))
    speaking.start()
    assert await_hello(publisher) == 41
    speaking.join()
