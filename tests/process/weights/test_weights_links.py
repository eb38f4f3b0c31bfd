"""Publisher and receiver over links that come and go, with ends that die or hang."""

from __future__ import annotations

import logging
import queue
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from paceline.v1 import worker_pb2
from paceline.weights.weight_transfer import StagedWeights
from paceline.weights.wire.tensor_checksum import weights_digest
from policy_worker.publishing.publisher import WeightPublisher
from rollout_worker.weight_receiver import WeightReceiver
from testbed.patience import Patience, patient
from testbed.workers import weight_link_peer

CPU = torch.device("cpu")


class PublishingEnd:
    def __init__(self, url: str, run_id: str) -> None:
        self.errors: queue.Queue[int] = queue.Queue()
        self.publisher = WeightPublisher(
            url=url,
            run_id=run_id,
            device=CPU,
            on_link_error=lambda epoch, detail: self.errors.put(epoch),
        )

    def publish(self, version: int) -> None:
        self.publisher.publish(version, weights_of(version).items())


class ReceivingEnd:
    def __init__(self, url: str, run_id: str) -> None:
        self.staged: queue.Queue[StagedWeights] = queue.Queue()
        self.errors: queue.Queue[int] = queue.Queue()
        self.engine_free = threading.Event()
        self.engine_free.set()
        self.at_engine = -1
        """The version that the engine was handed last."""
        self.receiver = WeightReceiver(
            url=url,
            run_id=run_id,
            device=CPU,
            on_weights=self._take,
            on_link_error=lambda epoch, detail: self.errors.put(epoch),
        )

    def _take(self, weights: StagedWeights) -> None:
        self.at_engine = weights.version
        self.engine_free.wait(patient(60))
        self.staged.put(weights)

    def next_version(self, timeout_s: float = 60.0) -> int:
        weights = self.staged.get(timeout=timeout_s)
        assert weights.digest == weights_digest(weights_of(weights.version).items())
        return weights.version


@pytest.fixture
def publishing(url: str, request: pytest.FixtureRequest) -> Iterator[PublishingEnd]:
    end = PublishingEnd(url, request.node.name)
    yield end
    end.publisher.close()


@pytest.fixture
def receiving(url: str, request: pytest.FixtureRequest) -> Iterator[ReceivingEnd]:
    end = ReceivingEnd(url, request.node.name)
    yield end
    end.receiver.close()


def weights_of(version: int, elements: int = 100_000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((elements,), float(version)), "v": torch.tensor(version)}


def link(epoch: int) -> worker_pb2.WeightsLink:
    return worker_pb2.WeightsLink(epoch=epoch)


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    patience = Patience(timeout_s)
    while not condition():
        assert patience.left()
        threading.Event().wait(0.005)


def test_a_joiner_gets_the_current_version_at_once(
    publishing: PublishingEnd, receiving: ReceivingEnd
) -> None:
    publishing.publish(5)
    publishing.publisher.set_links([link(1)])
    receiving.receiver.set_link(link(1))
    assert receiving.next_version() == 5
    until(lambda: publishing.publisher.formed_epochs() == [1])
    assert receiving.receiver.formed_epochs() == [1]
    publishing.publish(6)
    assert receiving.next_version() == 6
    until(lambda: publishing.publisher.last_transfer_s > 0)


class Trained:
    """Weights in bfloat16 of which each version changes a hundredth."""

    def __init__(self, publishing: PublishingEnd, receiving: ReceivingEnd) -> None:
        self._publishing, self._receiving = publishing, receiving
        self.weights = torch.randn(200_000).bfloat16()

    def publish(self, version: int) -> None:
        self.weights = torch.where(torch.rand(200_000) < 0.01, -self.weights, self.weights)
        self._publishing.publisher.publish(version, [("w", self.weights)])

    def arrives(self, version: int) -> None:
        staged = self._receiving.staged.get(timeout=patient(60))
        assert staged.version == version
        assert torch.equal(staged.tensors["w"], self.weights)


def shares(caplog: pytest.LogCaptureFixture) -> list[float]:
    """Of the whole weights' bytes, by transfer."""
    sent = [r.getMessage() for r in caplog.records if r.getMessage().startswith("weights sent")]
    return [float(message.partition("share=")[2].split()[0]) for message in sent]


def test_each_version_after_the_first_travels_as_what_changed(
    publishing: PublishingEnd, receiving: ReceivingEnd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trained = Trained(publishing, receiving)
    publishing.publisher.set_links([link(1)])
    receiving.receiver.set_link(link(1))
    for version in (1, 2):
        trained.publish(version)
        trained.arrives(version)
        until(lambda version=version: len(shares(caplog)) == version)
    # The base outlives the link.
    publishing.publisher.set_links([link(2)])
    receiving.receiver.set_link(link(2))
    trained.publish(3)
    trained.arrives(3)
    until(lambda: len(shares(caplog)) == 3)
    whole, second, third = shares(caplog)
    assert whole == 1 and second < 0.05 and third < 0.05


def test_a_damaged_base_costs_one_link_and_then_the_whole(
    publishing: PublishingEnd, receiving: ReceivingEnd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trained = Trained(publishing, receiving)
    publishing.publisher.set_links([link(1)])
    receiving.receiver.set_link(link(1))
    trained.publish(1)
    trained.arrives(1)
    base = receiving.receiver._base
    assert base is not None
    base.flat[5] ^= 1
    trained.publish(2)
    assert receiving.errors.get(timeout=patient(60)) == 1
    publishing.publisher.set_links([link(2)])
    receiving.receiver.set_link(link(2))
    trained.arrives(2)
    until(lambda: len(shares(caplog)) == 2)
    assert shares(caplog) == [1, 1]


def test_versions_pass_by_a_receiver_that_is_busy(
    publishing: PublishingEnd, receiving: ReceivingEnd
) -> None:
    receiving.engine_free.clear()
    publishing.publisher.set_links([link(1)])
    receiving.receiver.set_link(link(1))
    publishing.publish(1)
    until(lambda: receiving.at_engine == 1)
    for version in range(2, 6):
        publishing.publish(version)
    receiving.engine_free.set()
    assert [receiving.next_version(), receiving.next_version()] == [1, 5]


def test_a_version_that_is_not_newer_is_not_published(publishing: PublishingEnd) -> None:
    publishing.publish(5)
    publishing.publish(4)
    assert publishing.publisher.version == 5


def test_weights_of_a_lost_commit_are_replaced_by_older_ones(
    publishing: PublishingEnd, receiving: ReceivingEnd
) -> None:
    """Redis lost the commit of version 5; the replica has received 4 since, and the link renewed."""
    publishing.publish(5)
    publishing.publisher.set_links([link(1)])
    receiving.receiver.set_link(link(1), 5)
    assert receiving.next_version() == 5
    until(lambda: receiving.receiver.version == 5)
    publishing.publisher.forget()
    publishing.publish(4)
    publishing.publisher.set_links([link(2)])
    receiving.receiver.set_link(link(2), 4)
    assert receiving.next_version() == 4
    publishing.publish(5)
    assert receiving.next_version() == 5


def test_weights_of_an_outvoted_replica_are_replaced_under_the_same_version(
    publishing: PublishingEnd, receiving: ReceivingEnd
) -> None:
    publishing.publish(5)
    publishing.publisher.set_links([link(1)])
    receiving.receiver.set_link(link(1), 5)
    assert receiving.next_version() == 5
    until(lambda: receiving.receiver.version == 5)
    publishing.publisher.forget()
    publishing.publish(5)
    publishing.publisher.set_links([link(2)])
    again = link(2)
    again.reload = True
    receiving.receiver.set_link(again, 5)
    assert receiving.next_version() == 5


def test_a_formed_anew_link_sends_only_what_is_missing(
    publishing: PublishingEnd, receiving: ReceivingEnd
) -> None:
    publishing.publish(1)
    for epoch in (1, 2):
        publishing.publisher.set_links([link(epoch)])
        receiving.receiver.set_link(link(epoch))
        until(lambda epoch=epoch: publishing.publisher.formed_epochs() == [epoch])
        if epoch == 1:
            assert receiving.next_version() == 1
            until(lambda: receiving.receiver.version == 1)
    with pytest.raises(queue.Empty):
        receiving.next_version(timeout_s=0.3)
    publishing.publish(2)
    assert receiving.next_version() == 2


def test_an_engine_that_fails_to_load_ends_the_link_and_not_the_receiver(
    url: str, publishing: PublishingEnd, request: pytest.FixtureRequest
) -> None:
    failures = iter([True, False])
    staged: queue.Queue[int] = queue.Queue()
    errors: queue.Queue[int] = queue.Queue()

    def load(weights: StagedWeights) -> None:
        if next(failures):
            raise ValueError("no such parameter")
        staged.put(weights.version)

    receiver = WeightReceiver(
        url=url,
        run_id=request.node.name,
        device=CPU,
        on_weights=load,
        on_link_error=lambda epoch, detail: errors.put(epoch),
    )
    publishing.publish(1)
    publishing.publisher.set_links([link(1)])
    receiver.set_link(link(1))
    assert errors.get(timeout=patient(60)) == 1
    assert publishing.errors.get(timeout=patient(60)) == 1
    assert receiver.version == -1
    publishing.publisher.set_links([link(2)])
    receiver.set_link(link(2))
    assert staged.get(timeout=patient(60)) == 1
    receiver.close()


def test_a_damaged_transfer_leaves_the_old_version(
    publishing: PublishingEnd, receiving: ReceivingEnd
) -> None:
    publishing.publish(1)
    publishing.publisher.set_links([link(1)])
    receiving.receiver.set_link(link(1))
    assert receiving.next_version() == 1
    receiving.engine_free.clear()
    publishing.publish(2)
    # The next transfer begins once the engine has taken this one.
    until(lambda: receiving.at_engine == 2)
    publishing.publish(3)
    newest = publishing.publisher._newest
    assert newest is not None
    newest.checksum(0)
    newest.flat[100] ^= 1
    receiving.engine_free.set()
    assert receiving.errors.get(timeout=patient(60)) == 1
    assert receiving.receiver.version in (1, 2)


def test_a_publisher_killed_mid_send_leaves_the_old_version_and_a_usable_receiver(
    url: str,
    publishing: PublishingEnd,
    receiving: ReceivingEnd,
    request: pytest.FixtureRequest,
) -> None:
    publishing.publish(3)
    publishing.publisher.set_links([link(1)])
    receiving.receiver.set_link(link(1))
    assert receiving.next_version() == 3
    sender = weight_link_peer.start("half-sender", url, request.node.name, 2)
    receiving.receiver.set_link(link(2))
    try:
        assert weight_link_peer.next_line(sender) == {"sent": "half"}
    finally:
        sender.kill()
        sender.wait()
    assert receiving.errors.get(timeout=patient(60)) == 2
    assert receiving.receiver.version == 3
    assert receiving.staged.empty()
    publishing.publisher.set_links([link(3)])
    receiving.receiver.set_link(link(3))
    publishing.publish(4)
    assert receiving.next_version() == 4


def test_a_stopped_publisher_is_left_for_the_next_link(
    url: str,
    publishing: PublishingEnd,
    receiving: ReceivingEnd,
    request: pytest.FixtureRequest,
) -> None:
    sender = weight_link_peer.start("half-sender", url, request.node.name, 1)
    receiving.receiver.set_link(link(1))
    try:
        assert weight_link_peer.next_line(sender) == {"sent": "half"}
        sender.send_signal(signal.SIGSTOP)
        publishing.publish(8)
        publishing.publisher.set_links([link(2)])
        receiving.receiver.set_link(link(2))
        assert receiving.next_version(timeout_s=patient(5)) == 8
        assert receiving.errors.empty()
    finally:
        sender.kill()
        sender.wait()


def test_a_stopped_receiver_delays_nobody(
    url: str,
    publishing: PublishingEnd,
    receiving: ReceivingEnd,
    request: pytest.FixtureRequest,
) -> None:
    stopped = weight_link_peer.start("receiver", url, request.node.name, 1)
    publishing.publisher.set_links([link(1), link(2)])
    receiving.receiver.set_link(link(2))
    try:
        publish_large(publishing, 1)
        assert weight_link_peer.next_line(stopped)["version"] == 1
        assert receiving.staged.get(timeout=patient(60)).version == 1
        stopped.send_signal(signal.SIGSTOP)
        for version in range(2, 6):
            assert publish_large(publishing, version) < patient(1.0)
            assert receiving.staged.get(timeout=patient(60)).version == version
        # What the stopped one was being sent arrives when it wakes up, then the newest.
        stopped.send_signal(signal.SIGCONT)
        arrived = [weight_link_peer.next_line(stopped)["version"]]
        while arrived[-1] != 5:
            arrived.append(weight_link_peer.next_line(stopped)["version"])
        assert arrived in ([2, 5], [5], [2, 3, 5], [2, 4, 5])
        # Stopped for good: withdrawing its link ends the thread that waits for it.
        stopped.send_signal(signal.SIGSTOP)
        publish_large(publishing, 6)
        assert receiving.staged.get(timeout=patient(60)).version == 6
        publishing.publisher.set_links([link(2)])
        until(lambda: not any(t.name == "publish-1" for t in threading.enumerate()))
        assert publishing.errors.empty()
    finally:
        stopped.send_signal(signal.SIGCONT)
        stopped.kill()
        stopped.wait()


def test_a_killed_receiver_is_reported_once(
    url: str, publishing: PublishingEnd, request: pytest.FixtureRequest
) -> None:
    victim = weight_link_peer.start("receiver", url, request.node.name, 1)
    publishing.publisher.set_links([link(1)])
    publishing.publish(1)
    assert weight_link_peer.next_line(victim)["version"] == 1
    victim.kill()
    victim.wait()
    publishing.publish(2)
    assert publishing.errors.get(timeout=patient(60)) == 1
    # The controller has not reacted yet: the same directive again changes nothing.
    publishing.publisher.set_links([link(1)])
    publishing.publish(3)
    with pytest.raises(queue.Empty):
        publishing.errors.get(timeout=0.3)
    assert publishing.publisher.formed_epochs() == []


def test_close_ends_every_thread(publishing: PublishingEnd, receiving: ReceivingEnd) -> None:
    # An earlier test may have left a thread whose operation gloo forgot.
    others = set(threading.enumerate())
    publishing.publish(1)
    # One link is formed, the other waits for a receiver that never comes.
    publishing.publisher.set_links([link(1), link(2)])
    receiving.receiver.set_link(link(1))
    assert receiving.next_version() == 1
    publishing.publisher.close()
    receiving.receiver.close()
    ours = ("publish-", "receive-", "mesh-")
    until(
        lambda: not any(t.name.startswith(ours) for t in threading.enumerate() if t not in others)
    )


def publish_large(publishing: PublishingEnd, version: int) -> float:
    """More than socket buffers hold, so that a stopped receiver does stop its sender."""
    weights = weights_of(version, elements=8_000_000)
    return publishing.publisher.publish(version, weights.items())
