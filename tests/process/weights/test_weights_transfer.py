"""What arrives is what was published, bit for bit, or nothing arrives."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from paceline.weights.arriving_weights import ArrivingWeights
from paceline.weights.link_messages import (
    PUBLISHER,
    RECEIVER,
    acknowledge,
    await_hello,
    recv_frame,
    say_hello,
    send_frame,
)
from paceline.weights.tensor_checksum import weights_digest
from paceline.weights.weight_manifest import WeightsRefused
from paceline.weights.weight_sending import Sent, announce, send_share
from paceline.weights.weight_snapshot import WeightSnapshot, WireDtype
from paceline.weights.weight_transfer import StagedWeights, receive_snapshot

CPU = torch.device("cpu")
Pair = tuple[ProcessMesh, ProcessMesh]


@pytest.fixture
def link(url: str, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both ends of a link in this process."""

    def form(rank: int) -> ProcessMesh:
        return ProcessMesh.form(
            url=url,
            key=request.node.name,
            rank=rank,
            size=2,
            device=CPU,
            cancelled=lambda: False,
        )

    with ThreadPoolExecutor() as pool:
        publisher, receiver = pool.map(form, (PUBLISHER, RECEIVER))
    yield publisher, receiver
    publisher.abandon()
    receiver.abandon()


class Sending(threading.Thread):
    """Sends in the background; what went wrong is in ``error``."""

    def __init__(self, mesh: ProcessMesh, snapshot: WeightSnapshot) -> None:
        super().__init__(daemon=True)
        self._mesh, self._snapshot = mesh, snapshot
        self.error: Exception | None = None
        self.sent: Sent | None = None
        self.start()

    def run(self) -> None:
        try:
            announce(self._mesh, self._snapshot)
            self.sent = send_share(self._mesh, lambda ask: self._snapshot)
        except (MeshError, EpochCancelled, WeightsRefused) as error:
            self.error = error


def transfer(link: Pair, snapshot: WeightSnapshot, **options: Any) -> tuple[StagedWeights, Sent]:
    """All of it; ``options``: of the receiver."""
    publisher, receiver = link
    sending = Sending(publisher, snapshot)
    staged = receive_snapshot([receiver], **options)
    acknowledge(receiver, staged.version)
    sending.join(timeout=60)
    assert sending.error is None and sending.sent is not None
    return staged, sending.sent


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
    weights = odd_weights()
    snapshot = WeightSnapshot.take(3, weights.items(), bucket_bytes=bucket_bytes)
    staged, _ = transfer(link, snapshot)
    assert staged.version == 3
    assert list(staged.tensors) == list(weights)
    for name, tensor in weights.items():
        found = staged.tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert weights_digest([("t", found)]) == weights_digest([("t", tensor)])
    assert staged.tensors["head"] is staged.tensors["embed"]
    assert weights_digest(staged.tensors.items()) == weights_digest(weights.items())


def test_a_snapshot_does_not_follow_the_trainer() -> None:
    weight = torch.ones(5)
    snapshot = WeightSnapshot.take(1, [("w", weight)])
    weight.zero_()
    assert snapshot.manifest.views(snapshot.flat)["w"].tolist() == [1] * 5


def test_a_damaged_bucket_is_refused(link: Pair) -> None:
    publisher, receiver = link
    snapshot = WeightSnapshot.take(1, [("w", torch.ones(5000))], bucket_bytes=4096)
    for i in range(snapshot.manifest.buckets):
        snapshot.checksum(i)
    snapshot.flat[9000] ^= 1
    Sending(publisher, snapshot)
    with pytest.raises(WeightsRefused, match="bucket 2 of version 1 was damaged"):
        receive_snapshot([receiver])


@pytest.mark.parametrize(
    ("offered", "options", "said"),
    [
        (4, {"newer_than": 5}, "is here already"),
        (5, {"newer_than": 5}, "is here already"),
        (6, {"limit_bytes": 10_000}, "more than the limit"),
    ],
)
def test_a_version_that_is_not_newer_or_too_large_is_refused(
    link: Pair, offered: int, options: dict[str, int], said: str
) -> None:
    publisher, receiver = link
    Sending(publisher, WeightSnapshot.take(offered, [("w", torch.ones(5000))]))
    with pytest.raises(WeightsRefused, match=said):
        receive_snapshot([receiver], **options)


@pytest.mark.parametrize("length", [-1, 0, 1 << 40])
def test_a_message_of_absurd_length_is_refused(link: Pair, length: int) -> None:
    publisher, receiver = link
    publisher.send_async(torch.tensor([length], dtype=torch.int64), RECEIVER)
    with pytest.raises(WeightsRefused, match=f"a message of {length} bytes"):
        receive_snapshot([receiver])


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"[1]", b'{"version":"1"}', b'{"version":1}'])
def test_a_message_of_nonsense_is_refused(link: Pair, raw: bytes) -> None:
    publisher, receiver = link
    publisher.send_async(torch.tensor([len(raw)], dtype=torch.int64), RECEIVER)
    publisher.send_async(torch.frombuffer(bytearray(raw), dtype=torch.uint8), RECEIVER)
    with pytest.raises(WeightsRefused):
        receive_snapshot([receiver])


def test_a_receiver_of_another_release_is_told_so(link: Pair) -> None:
    publisher, receiver = link
    with ThreadPoolExecutor() as pool:
        publishing = pool.submit(await_hello, publisher)
        send_frame(receiver, {"protocol": 3, "version": 5, "base": ""}, PUBLISHER)
        answer = recv_frame(receiver, PUBLISHER, 1 << 16)
    assert "version 3 " in answer["refused"]
    assert "run the same release of Paceline" in answer["refused"]
    refusal = publishing.exception()
    assert isinstance(refusal, WeightsRefused) and str(refusal) == answer["refused"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"version": 1, "direct": False}, "run the same release of Paceline"),
        ({"protocol": 9, "refused": "another release"}, "another release"),
    ],
)
def test_a_publisher_that_is_of_another_release_or_refuses_is_heard(
    link: Pair, answer: dict[str, Any], said: str
) -> None:
    publisher, receiver = link

    def answer_it() -> None:
        recv_frame(publisher, RECEIVER, 1 << 16)
        send_frame(publisher, answer, RECEIVER)

    with ThreadPoolExecutor() as pool:
        pool.submit(answer_it)
        with pytest.raises(WeightsRefused, match=said):
            say_hello(receiver, -1)


def base_of(snapshot: WeightSnapshot) -> ArrivingWeights:
    base = ArrivingWeights(snapshot.version, snapshot.manifest)
    base.flat.copy_(snapshot.flat)
    for bucket in range(snapshot.manifest.buckets):
        base.add(bucket, snapshot.checksum(bucket), None)
    return base


def trained(weights: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """The weights after a step that changed this share of their elements."""
    generator = torch.Generator().manual_seed(2)
    result = {}
    for name, tensor in weights.items():
        changed = torch.rand(tensor.shape, generator=generator) < share
        result[name] = torch.where(changed, tensor * 1.01, tensor)
    return result


def two_versions(share: float) -> tuple[WeightSnapshot, WeightSnapshot]:
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(300, 70, generator=generator).bfloat16() for name in "abc"}
    old = WeightSnapshot.take(1, weights.items(), bucket_bytes=8192)
    new = WeightSnapshot.take(2, trained(weights, share).items(), bucket_bytes=8192)
    new.follow(old)
    return old, new


def send_second(link: Pair, new: WeightSnapshot, held: ArrivingWeights | None) -> Sent:
    staged, sent = transfer(link, new, newer_than=1, base=held)
    assert staged.base is not None and torch.equal(staged.base.flat, new.flat)
    assert staged.base.fingerprint_of() == new.fingerprint
    return sent


@pytest.mark.parametrize("case", ["a base", "much has changed", "no base", "other bits"])
def test_what_has_no_base_to_speak_of_travels_whole(link: Pair, case: str) -> None:
    old, new = two_versions(share=1.0 if case == "much has changed" else 0.01)
    held: ArrivingWeights | None = base_of(old)
    if case == "no base":
        held = None
    elif case == "other bits":
        flat = old.flat.clone()
        flat[0] ^= 1
        held = base_of(WeightSnapshot(1, old.manifest, flat))
    sent = send_second(link, new, held)
    if case == "a base":
        assert 0 < sent.wire_bytes < 0.05 * new.manifest.total_bytes
        assert held is not None and torch.equal(held.flat, old.flat), "it serves another try"
    else:
        assert sent.wire_bytes == new.manifest.total_bytes


def test_a_transfer_goes_on_with_its_base_while_the_next_version_is_published(link: Pair) -> None:
    old, new = two_versions(share=0.01)
    held = base_of(old)
    first = new.delta(0, old)
    new.forget_base()
    assert first is not None and new.base is None
    sent = send_second(link, new, held)
    assert sent.wire_bytes == new.manifest.total_bytes, "a transfer that begins now has no base"


def test_deltas_for_a_base_that_is_not_here_are_refused(link: Pair) -> None:
    publisher, receiver = link
    old, new = two_versions(share=0.01)
    new.base_for = lambda held: old  # type: ignore[method-assign]
    Sending(publisher, new)
    with pytest.raises(WeightsRefused, match="not here"):
        receive_snapshot([receiver])


@pytest.mark.parametrize("size", [-1, 8192])
def test_a_delta_of_absurd_size_is_refused(
    link: Pair, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, receiver = link
    old, new = two_versions(share=0.01)
    monkeypatch.setattr(new, "delta", lambda index, base: LyingSize(size))
    Sending(publisher, new)
    with pytest.raises(WeightsRefused, match=f"a delta of {size} bytes"):
        receive_snapshot([receiver], base=base_of(old))


class LyingSize:
    device = torch.device("cpu")

    def __init__(self, size: int) -> None:
        self._size = size

    def numel(self) -> int:
        return self._size

    def cpu(self) -> Tensor:
        return torch.zeros(8, dtype=torch.uint8)


def test_weights_travel_in_the_type_of_the_engine(link: Pair) -> None:
    weights = odd_weights()
    wire = WireDtype(torch.bfloat16, {"specials"})
    staged, _ = transfer(link, WeightSnapshot.take(1, weights.items(), wire=wire))
    for name, tensor in weights.items():
        keeps = name in ("bf16", "specials", "flags", "fp8")
        expected = tensor if keeps else tensor.bfloat16()
        assert staged.tensors[name].dtype == expected.dtype, name
        assert weights_digest([("t", staged.tensors[name])]) == weights_digest([("t", expected)])
    assert staged.tensors["head"] is staged.tensors["embed"]
