"""Weights over relays: each fault of a relay costs its children a resume, and never wrong
weights."""

import logging
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from paceline.v1 import worker_pb2
from paceline.weights.arriving_weights import ArrivingWeights
from paceline.weights.weight_link import LinkKey, WeightLink
from paceline.weights.weight_sending import SendingEnd
from paceline.weights.weight_snapshot import WeightSnapshot
from tests.fixtures.weight_links import (
    CPU,
    PublishingEnd,
    ReceivingEnd,
    Trained,
    link,
    shares,
    until,
)
from tests.process.weights.conftest import StartPeer

BUCKETS = 6
BUCKET_BYTES = 4096
STALL_S = 0.5


def weights_of(version: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + version)
    return {"w": torch.randn(BUCKETS * BUCKET_BYTES // 2, generator=generator).bfloat16()}


def snapshot_of(version: int, seed: int = 0) -> WeightSnapshot:
    return WeightSnapshot.take(
        version, weights_of(version, seed).items(), bucket_bytes=BUCKET_BYTES
    )


class Dripping(SendingEnd):
    """A trainer that has its buckets when the test says so."""

    thread_name = "drip"

    def __init__(self, url: str, run_id: str) -> None:
        self.errors: queue.Queue[int] = queue.Queue()
        self.source: ArrivingWeights | None = None
        self.snapshot: WeightSnapshot | None = None
        super().__init__(
            url=url,
            run_id=run_id,
            device=CPU,
            on_link_error=lambda epoch, detail: self.errors.put(epoch),
        )

    def newest_for(self, link: WeightLink) -> ArrivingWeights | None:
        return self.source

    def _converge(self, desired: Mapping[LinkKey, WeightLink]) -> None:
        super()._converge(desired)
        if self.source is not None:
            self.source.wake()

    def begin(self, snapshot: WeightSnapshot, buckets: int = BUCKETS) -> None:
        before, self.snapshot = self.source, snapshot
        source = ArrivingWeights(snapshot.version, snapshot.manifest)
        source.flat.copy_(snapshot.flat)
        with self._changed:
            self.source = source
            self._changed.notify_all()
        if before is not None:
            before.give_up()
        self.drip(buckets)

    def drip(self, buckets: int) -> None:
        assert self.source is not None and self.snapshot is not None
        for _ in range(buckets):
            index = self.source.held
            self.source.add(index, self.snapshot.checksum(index), None)


class Receiving(ReceivingEnd):
    """A rollout worker's ends."""

    def __init__(self, url: str, run_id: str, *, deltas: bool = True) -> None:
        super().__init__(url, run_id, relays=True, stall_s=STALL_S, deltas=deltas)

    @property
    def relay(self) -> SendingEnd:
        assert self.receiver.relay is not None
        return self.receiver.relay

    def serves(self, version: int, seed: int = 0) -> None:
        self.gets(version, weights_of(version, seed))


class Relays:
    def __init__(self, url: str, run_id: str, start_peer: StartPeer) -> None:
        self.url, self.run_id, self.start_peer = url, run_id, start_peer
        self.trainer = Dripping(url, run_id)
        self.receivings: list[Receiving] = []

    def receiving(self, **options: bool) -> Receiving:
        end = Receiving(self.url, self.run_id, **options)
        self.receivings.append(end)
        return end

    def process(self, epoch: int, relays: Sequence[int]) -> subprocess.Popen[str]:
        return self.start_peer("receiver", epoch, relays=relays, stall_s=STALL_S)

    def close(self) -> None:
        self.trainer.close()
        for end in self.receivings:
            end.receiver.close()


@pytest.fixture
def relays(url: str, request: pytest.FixtureRequest, start_peer: StartPeer) -> Iterator[Relays]:
    made = Relays(url, request.node.name, start_peer)
    yield made
    made.close()


def from_relay(epoch: int, tree: int = 0) -> worker_pb2.WeightsLink:
    return link(epoch, tree=tree, relayed=True)


def chain(relays: Relays, length: int) -> list[Receiving]:
    """Trainer to first to second and so on, over links 1, 2, ..."""
    ends = [relays.receiving() for _ in range(length)]
    relays.trainer.set_links([link(1)])
    for epoch, end in enumerate(ends, 1):
        end.relay.set_links([link(epoch + 1)] if epoch < length else [])
        end.receiver.set_link(link(epoch, relayed=epoch > 1), 0)
    return ends


def test_a_bucket_passes_through_a_chain_at_once_and_the_trainer_sends_one_copy(
    relays: Relays,
) -> None:
    ends = chain(relays, 3)
    relays.trainer.begin(snapshot_of(1), buckets=2)
    until(lambda: ends[-1].buckets == 2)
    assert all(end.staged.empty() for end in ends), "the next buckets are still to come"
    relays.trainer.drip(BUCKETS - 2)
    for version in (1, 2):
        for end in ends:
            end.serves(version)
        if version == 1:
            relays.trainer.begin(snapshot_of(2))
    until(lambda: relays.trainer.sent_bytes == 2 * BUCKETS * BUCKET_BYTES)


def test_children_go_on_from_another_receiver_without_a_byte_from_the_trainer(
    relays: Relays,
) -> None:
    process, other, child = relays.process(1, [2]), relays.receiving(), relays.receiving()
    relays.trainer.set_links([link(1), link(3)])
    other.receiver.set_link(link(3), 1)
    child.receiver.set_link(from_relay(2))
    relays.trainer.begin(snapshot_of(1), buckets=3)
    until(lambda: child.buckets == 3)
    child.receiver.set_link(from_relay(2), 1)
    process.kill()
    process.wait()
    assert child.failure()[0] == 2
    other.relay.set_links([link(4)])
    child.receiver.set_link(from_relay(4), 1)
    relays.trainer.drip(BUCKETS - 3)
    child.serves(1)
    until(lambda: other.relay.resumed == 1)
    assert other.relay.sent_bytes == (BUCKETS - 3) * BUCKET_BYTES


def test_a_relay_that_waits_for_its_own_source_is_not_at_fault(relays: Relays) -> None:
    """Else all that hang on a stopped relay, at whatever distance, would go to the trainer at
    once."""
    process, middle, last = relays.process(1, [2]), relays.receiving(), relays.receiving()
    relays.trainer.set_links([link(1)])
    middle.receiver.set_link(from_relay(2))
    middle.relay.set_links([link(3)])
    last.receiver.set_link(from_relay(3))
    relays.trainer.begin(snapshot_of(1), buckets=3)
    until(lambda: last.buckets == 3)
    middle.receiver.set_link(from_relay(2), 1)
    last.receiver.set_link(from_relay(3), 1)
    process.send_signal(signal.SIGSTOP)
    relays.trainer.drip(BUCKETS - 3)
    assert middle.failure()[0] == 2
    # As long again as it took to find the stopped one at fault.
    assert not threading.Event().wait(2 * STALL_S)
    relays.trainer.set_links([link(4)])
    middle.receiver.set_link(link(4), 1)
    middle.serves(1)
    last.serves(1)
    assert last.errors.empty()


def test_a_relay_without_anything_new_to_send_is_not_at_fault(relays: Relays) -> None:
    first, second = chain(relays, 2)
    relays.trainer.begin(snapshot_of(1))
    first.serves(1)
    second.serves(1)
    # The controller knows version 2, and the trainer does not send it yet.
    second.receiver.set_link(from_relay(2), 2)
    assert not threading.Event().wait(3 * STALL_S)
    relays.trainer.begin(snapshot_of(2))
    first.serves(2)
    second.serves(2)
    assert second.errors.empty()


def test_what_a_relay_has_damaged_is_noticed_and_fetched_elsewhere(relays: Relays) -> None:
    (relay,), child = chain(relays, 1), relays.receiving()
    relays.trainer.begin(snapshot_of(1))
    relay.serves(1)
    held = relay.receiver.relay._held  # type: ignore[union-attr]
    assert held is not None
    held.flat[3 * BUCKET_BYTES + 5] ^= 1
    relay.relay.set_links([link(2)])
    child.receiver.set_link(from_relay(2), 1)
    epoch, detail = child.failure()
    assert (epoch, detail) == (2, "bucket 3 of version 1 was damaged on the way")
    assert child.staged.empty()
    relays.trainer.set_links([link(1), link(3)])
    child.receiver.set_link(link(3), 1)
    child.serves(1)
    until(lambda: relays.trainer.resumed == 1)
    assert relays.trainer.sent_bytes == (2 * BUCKETS - 3) * BUCKET_BYTES


def test_other_weights_under_the_same_version_are_not_mixed(relays: Relays) -> None:
    """The relay has them from a trainer whose commit was lost: its checksums are right, and none of
    its buckets is."""
    other, child = Dripping(relays.url, relays.run_id), relays.receiving()
    other.set_links([link(1)])
    child.receiver.set_link(from_relay(1), 1)
    other.begin(snapshot_of(1, seed=9), buckets=3)
    until(lambda: child.buckets == 3)
    relays.trainer.set_links([link(2)])
    child.receiver.set_link(link(2), 1)
    other.close()
    relays.trainer.begin(snapshot_of(1))
    child.serves(1)
    until(lambda: relays.trainer.sent_bytes == BUCKETS * BUCKET_BYTES)
    assert relays.trainer.resumed == 0


def test_a_relay_that_begins_an_older_version_midway_is_refused(relays: Relays) -> None:
    child = relays.receiving()
    relays.trainer.set_links([link(1)])
    child.receiver.set_link(from_relay(1), 3)
    relays.trainer.begin(snapshot_of(2))
    child.serves(2)
    relays.trainer.begin(snapshot_of(3), buckets=2)
    until(lambda: child.buckets == 2)
    stale = Lagging(relays.url, relays.run_id)
    stale.begin(snapshot_of(1))
    stale.set_links([link(2)])
    child.receiver.set_link(from_relay(2), 3)
    epoch, detail = child.failure()
    assert (epoch, detail) == (2, "version 1 was offered, 2 is here already")
    stale.close()
    relays.trainer.set_links([link(3)])
    child.receiver.set_link(link(3), 3)
    relays.trainer.drip(BUCKETS - 2)
    child.serves(3)
    until(lambda: relays.trainer.resumed == 1)


class Lagging(Dripping):
    """A relay that does not look at what its receiver has."""

    def _newer(self, link: WeightLink, has: int) -> ArrivingWeights | None:
        return self.source


def test_a_version_that_its_source_gave_up_is_followed_by_the_next(relays: Relays) -> None:
    ends = chain(relays, 3)
    relays.trainer.begin(snapshot_of(1), buckets=4)
    until(lambda: ends[-1].buckets == 4)
    relays.trainer.begin(snapshot_of(2))
    for end in ends:
        end.serves(2)
        assert end.errors.empty()


def test_a_version_that_was_taken_back_is_not_handed_on(relays: Relays) -> None:
    """Version 5 was never committed: the ledger plants a new tree, and the child is quicker than
    its relay."""
    relay, child = chain(relays, 2)
    relays.trainer.begin(snapshot_of(5, seed=9))
    relay.serves(5, seed=9)
    child.serves(5, seed=9)
    until(lambda: relay.receiver.version == child.receiver.version == 5)
    relay.relay.set_links([link(4, tree=4)])
    child.receiver.set_link(from_relay(4, tree=4), 4)
    until(lambda: child.receiver.formed_generations() == [4])
    relays.trainer.set_links([link(3, tree=4)])
    relays.trainer.begin(snapshot_of(4))
    relay.receiver.set_link(link(3, tree=4), 4)
    relay.serves(4)
    child.serves(4)
    relays.trainer.begin(snapshot_of(5))
    relay.serves(5)
    child.serves(5)


def test_what_is_committed_is_handed_on_in_a_new_tree(relays: Relays) -> None:
    (relay,), child = chain(relays, 1), relays.receiving()
    relays.trainer.begin(snapshot_of(1))
    relay.serves(1)
    until(lambda: relays.trainer.sent_bytes > 0)
    relay.relay.set_links([link(3, tree=2)])
    relays.trainer.set_links([link(2, tree=2)])
    child.receiver.set_link(from_relay(3, tree=2), 1)
    relay.receiver.set_link(link(2, tree=2), 1)
    child.serves(1)
    until(lambda: relay.relay.sent_bytes > 0)
    assert relays.trainer.sent_bytes == BUCKETS * BUCKET_BYTES


def test_deltas_are_handed_on_and_a_child_without_the_base_gets_the_whole(
    url: str, relays: Relays, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    publishing = PublishingEnd(url, relays.run_id)
    trained = Trained(publishing.publisher)
    relay, sibling, late = (relays.receiving() for _ in range(3))
    try:
        publishing.publisher.set_links([link(1)])
        relay.receiver.set_link(link(1), 0)
        relay.relay.set_links([link(2), link(3)])
        sibling.receiver.set_link(from_relay(2), 0)
        trained.publish(1)
        trained.reaches(1, relay, sibling)
        relayed(caplog, 2, 1)
        trained.publish(2)
        trained.reaches(2, relay, sibling)
        late.receiver.set_link(from_relay(3), 0)
        trained.reaches(2, late)
        relayed(caplog, 2, 2)
        relayed(caplog, 3, 1)
        assert shares(caplog, 2)[0] == 1 and shares(caplog, 2)[1] < 0.05
        assert shares(caplog, 3) == [1]
        # From here on it has the same base as its sibling.
        trained.publish(3)
        trained.reaches(3, relay, sibling, late)
        relayed(caplog, 3, 2)
        assert shares(caplog, 3)[1] < 0.05
    finally:
        publishing.publisher.close()


def relayed(caplog: pytest.LogCaptureFixture, epoch: int, transfers: int) -> None:
    """Waits until so many transfers over the link were acknowledged."""
    until(lambda: len(shares(caplog, epoch)) == transfers)
