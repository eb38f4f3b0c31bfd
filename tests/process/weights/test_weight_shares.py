"""Weights from several sources: each sends its buckets, and a fault of one costs a resume and never
wrong weights."""

import logging
import queue
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from paceline.v1 import worker_pb2
from paceline.weights import weight_link
from paceline.weights.weight_manifest import Manifest, WeightShard
from paceline.weights.weight_snapshot import WeightSnapshot
from policy_worker.publisher import WeightPublisher
from testbed.workers import weight_link_peer
from testbed.workers.weight_link_peer import SHARED_BUCKET_BYTES, shared_weights
from tests.fixtures.weight_links import CPU, ReceivingEnd, link, until
from tests.process.weights.conftest import StartPeer

STALL_S = 3.0


class Replica:
    """Publishers as the ranks of a replica have them, here all in this process but those that are
    left out."""

    def __init__(self, url: str, run_id: str, sources: int, without: int | None = None) -> None:
        self.errors: queue.Queue[int] = queue.Queue()
        self.ranks = [
            WeightPublisher(
                url=url,
                run_id=run_id,
                device=CPU,
                bucket_bytes=SHARED_BUCKET_BYTES,
                share=WeightShard(source, sources),
                on_link_error=lambda epoch, detail: self.errors.put(epoch),
            )
            for source in range(sources)
            if source != without
        ]

    def set_links(self, *links: worker_pb2.WeightsLink) -> None:
        for rank in self.ranks:
            rank.set_links(links)

    def publish(self, version: int, named: dict[str, Tensor], only: int | None = None) -> None:
        for rank in self.ranks:
            if only is None or rank.share.source == only:
                publish_share(rank, version, named)

    def sent(self) -> list[int]:
        return [rank.sent_bytes for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def publish_share(rank: WeightPublisher, version: int, named: dict[str, Tensor]) -> None:
    whole = WeightSnapshot.take(version, named.items(), bucket_bytes=SHARED_BUCKET_BYTES)

    def fill(flat: Tensor) -> None:
        for index in rank.share.buckets(whole.manifest):
            rank.share.bucket(whole.manifest, flat, index).copy_(whole.bucket(index))

    rank.publish_share(version, whole.manifest, fill)


class Sharing:
    def __init__(self, url: str, run_id: str, start_peer: StartPeer) -> None:
        self.url, self.run_id, self.start_peer = url, run_id, start_peer
        self.ends: list[Callable[[], None]] = []
        self.receiving = self.receiver()

    def receiver(self, *, relays: bool = False, stall_s: float = 60.0) -> ReceivingEnd:
        made = ReceivingEnd(self.url, self.run_id, relays=relays, stall_s=stall_s)
        self.ends.append(made.receiver.close)
        return made

    def join(self, replica: Replica, epoch: int) -> None:
        """Both ends are told of the link."""
        replica.set_links(link(epoch))
        self.receiving.receiver.set_link(link(epoch))

    def replica(self, sources: int, without: int | None = None) -> Replica:
        made = Replica(self.url, self.run_id, sources, without)
        self.ends.append(made.close)
        return made

    def source(self, epoch: int, source: int, sources: int) -> subprocess.Popen[str]:
        """A rank in a process of its own that sends one bucket of version 1, and the record of
        another, then hangs."""
        process = self.start_peer("half-source", epoch, share=(source, sources))
        assert weight_link_peer.next_line(process) == {"joins": epoch}
        return process


@pytest.fixture
def sharing(url: str, request: pytest.FixtureRequest, start_peer: StartPeer) -> Iterator[Sharing]:
    made = Sharing(url, request.node.name, start_peer)
    yield made
    for end in made.ends:
        end()


def manifest_of(named: dict[str, Tensor]) -> Manifest:
    return Manifest.of(named.items(), bucket_bytes=SHARED_BUCKET_BYTES)


def stepped(named: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The weights after a step that changed a hundredth of them."""
    generator = torch.Generator().manual_seed(seed)
    stepped = {
        name: torch.where(torch.rand(t.shape, generator=generator) < 0.01, -t, t)
        for name, t in named.items()
        if name != "head"
    }
    return stepped | {"head": stepped["embed"]}


@pytest.mark.parametrize("sources", [1, 2, 3, 4])
def test_every_source_sends_its_buckets_and_all_bits_arrive(sharing: Sharing, sources: int) -> None:
    replica, named = sharing.replica(sources), shared_weights(1)
    sharing.join(replica, 1)
    replica.publish(1, named)
    sharing.receiving.gets(1, named)
    assert named["head"] is named["embed"], "they are tied"
    manifest = manifest_of(named)
    shares = [rank.share.size_bytes(manifest) for rank in replica.ranks]
    until(lambda: replica.sent() == shares)
    assert sum(shares) == manifest.total_bytes
    assert sources == 1 or len(set(shares)) > 1, "shares are uneven"


def test_deltas_come_from_every_source(sharing: Sharing, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    replica, named = sharing.replica(3), shared_weights(1)
    sharing.join(replica, 1)
    for version in (1, 2):
        replica.publish(version, named)
        sharing.receiving.gets(version, named)
        named = stepped(named, version)
    until(lambda: all(rank.last_transfer_s for rank in replica.ranks))
    # The base outlives the link.
    sharing.join(replica, 2)
    before = replica.sent()
    replica.publish(3, named)
    sharing.receiving.gets(3, named)
    until(lambda: all(now > was for now, was in zip(replica.sent(), before, strict=True)))
    total = manifest_of(named).total_bytes
    assert sum(replica.sent()) - sum(before) < 0.1 * total
    assert sum(before) < 1.1 * total, "version 2 came as deltas, too"


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_fails_in_the_middle_of_a_bucket_is_noticed_and_the_rest_comes_elsewhere(
    sharing: Sharing, fault: signal.Signals
) -> None:
    receiving = sharing.receiver(stall_s=STALL_S if fault == signal.SIGSTOP else 60)
    replica, named = sharing.replica(2, without=1), shared_weights(1)
    half = sharing.source(1, 1, 2)
    replica.set_links(link(1))
    receiving.receiver.set_link(link(1))
    replica.publish(1, named)
    assert weight_link_peer.next_line(half) == {"sent": "half"}
    manifest = manifest_of(named)
    mine = len(WeightShard(0, 2).buckets(manifest))
    until(lambda: receiving.buckets == mine + 1)
    half.send_signal(fault)
    epoch, detail = receiving.failure()
    assert epoch == 1
    if fault == signal.SIGSTOP:
        assert "owes weights and sent nothing for" in detail
    assert receiving.staged.empty()
    # Another replica, with another number of ranks, has what is missing.
    other = sharing.replica(3)
    other.publish(1, named)
    other.set_links(link(2))
    receiving.receiver.set_link(link(2))
    receiving.gets(1, named)
    missing = [i for i in WeightShard(1, 2).buckets(manifest) if i != 1]
    sizes = [manifest.bucket(torch.empty(manifest.total_bytes, device="meta"), i) for i in missing]
    until(lambda: sum(other.sent()) == sum(bucket.numel() for bucket in sizes))


def test_a_rank_that_never_joins_a_link_is_reported_with_its_number(
    sharing: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_link, "FORM_S", 3.0)
    replica = sharing.replica(2, without=1)
    replica.publish(1, shared_weights(1))
    sharing.join(replica, 1)
    epoch, detail = sharing.receiving.failure()
    assert epoch == 1 and detail.startswith("rank 1 of ")


def test_a_version_that_one_source_has_no_more_is_passed_over(sharing: Sharing) -> None:
    """Rank 1 is ahead: rank 0 announces version 1 when rank 1 has published version 2 already."""
    replica, first, second = sharing.replica(2), shared_weights(1), shared_weights(2)
    replica.publish(1, first, only=1)
    replica.publish(2, second, only=1)
    replica.publish(1, first, only=0)
    sharing.join(replica, 1)
    until(lambda: sharing.receiving.receiver.formed_generations() == [1])
    replica.publish(2, second, only=0)
    sharing.receiving.gets(2, second)
    assert sharing.receiving.errors.empty()


def test_weights_published_again_under_their_version_are_never_mixed(sharing: Sharing) -> None:
    """The first were never committed. Rank 0 has still announced them when rank 1 has the second
    ones."""
    replica, lost, right = sharing.replica(2), shared_weights(8), shared_weights(9)
    replica.publish(1, lost)
    replica.ranks[1].forget()
    replica.publish(1, right, only=1)
    sharing.join(replica, 1)
    until(lambda: sharing.receiving.receiver.formed_generations() == [1])
    replica.ranks[0].forget()
    replica.publish(1, right, only=0)
    sharing.receiving.gets(1, right)


def test_what_a_broken_link_brought_of_other_weights_is_not_kept(sharing: Sharing) -> None:
    """Some of its buckets are the same: only the whole can be judged."""
    replica, lost = sharing.replica(2, without=1), shared_weights(1)
    other_embed = lost["embed"].clone()
    other_embed[0, 0] += 1
    right = lost | {"embed": other_embed, "head": other_embed}
    half = sharing.source(1, 1, 2)
    replica.publish(1, lost)
    sharing.join(replica, 1)
    assert weight_link_peer.next_line(half) == {"sent": "half"}
    manifest = manifest_of(lost)
    until(lambda: sharing.receiving.buckets == len(WeightShard(0, 2).buckets(manifest)) + 1)
    half.kill()
    assert sharing.receiving.failure()[0] == 1
    other = sharing.replica(2)
    other.publish(1, right)
    sharing.join(other, 2)
    sharing.receiving.gets(1, right)
    until(lambda: sum(other.sent()) == manifest.total_bytes)


def test_a_relay_hands_on_what_comes_from_several_sources(sharing: Sharing) -> None:
    relay, child = sharing.receiver(relays=True), sharing.receiver(relays=True)
    replica, named = sharing.replica(3), shared_weights(1)
    replica.set_links(link(1))
    relay.receiver.set_link(link(1))
    assert relay.receiver.relay is not None
    relay.receiver.relay.set_links([link(2)])
    child.receiver.set_link(link(2, relayed=True))
    for version in (1, 2):
        replica.publish(version, named)
        relay.gets(version, named)
        child.gets(version, named)
        named = stepped(named, version)
