"""Publisher and receiver over links that come and go, with ends that die or hang."""

import logging
import queue
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from paceline.weights.tensor_checksum import weights_digest
from testbed.patience import patient
from testbed.workers import weight_link_peer
from tests.fixtures.weight_links import PublishingEnd, ReceivingEnd, Trained, link, shares, until
from tests.process.weights.conftest import StartPeer


class Publishing(PublishingEnd):
    def publish(self, version: int) -> None:
        self.publisher.publish(version, weights_of(version).items())


class Receiving(ReceivingEnd):
    def next_version(self, timeout_s: float = 60.0) -> int:
        weights = self.staged.get(timeout=timeout_s)
        wanted = weights_digest(weights_of(weights.version).items())
        assert weights_digest(weights.tensors.items()) == wanted
        return weights.version


@pytest.fixture
def publishing(url: str, request: pytest.FixtureRequest) -> Iterator[Publishing]:
    end = Publishing(url, request.node.name)
    yield end
    end.publisher.close()


@pytest.fixture
def receiving(url: str, request: pytest.FixtureRequest) -> Iterator[Receiving]:
    end = Receiving(url, request.node.name)
    yield end
    end.receiver.close()


def weights_of(version: int, elements: int = 100_000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((elements,), float(version)), "v": torch.tensor(version)}


def join(publishing: Publishing, receiving: Receiving, epoch: int, version: int = -1) -> None:
    """Both ends are told of the link; ``version``: the one that the controller knows."""
    publishing.publisher.set_links([link(epoch)])
    receiving.receiver.set_link(link(epoch), *([version] if version >= 0 else []))


def test_a_joiner_gets_the_current_version_at_once(
    publishing: Publishing, receiving: ReceivingEnd
) -> None:
    publishing.publish(5)
    join(publishing, receiving, 1)
    assert receiving.next_version() == 5
    until(lambda: publishing.publisher.formed_generations() == [1])
    assert receiving.receiver.formed_generations() == [1]
    publishing.publish(6)
    assert receiving.next_version() == 6
    until(lambda: publishing.publisher.last_transfer_s > 0)


def test_a_damaged_base_costs_one_link_and_then_the_whole(
    publishing: Publishing, receiving: Receiving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trained = Trained(publishing.publisher)
    join(publishing, receiving, 1)
    trained.publish(1)
    trained.reaches(1, receiving)
    base = receiving.receiver._base
    assert base is not None
    base.flat[5] ^= 1
    trained.publish(2)
    assert receiving.failure()[0] == 1
    join(publishing, receiving, 2)
    trained.reaches(2, receiving)
    until(lambda: len(shares(caplog)) == 2)
    assert shares(caplog) == [1, 1]


def test_versions_pass_by_a_receiver_that_is_busy(
    publishing: Publishing, receiving: ReceivingEnd
) -> None:
    receiving.engine_free.clear()
    join(publishing, receiving, 1)
    publishing.publish(1)
    until(lambda: receiving.at_engine == 1)
    for version in range(2, 6):
        publishing.publish(version)
    receiving.engine_free.set()
    assert [receiving.next_version(), receiving.next_version()] == [1, 5]


def test_weights_of_a_lost_commit_are_replaced_by_older_ones(
    publishing: Publishing, receiving: ReceivingEnd
) -> None:
    """Redis lost the commit of version 5; the replica has received 4 since, and the link
    renewed."""
    publishing.publish(5)
    join(publishing, receiving, 1, 5)
    assert receiving.next_version() == 5
    until(lambda: receiving.receiver.version == 5)
    publishing.publisher.forget()
    publishing.publish(4)
    join(publishing, receiving, 2, 4)
    assert receiving.next_version() == 4
    publishing.publish(5)
    assert receiving.next_version() == 5


def test_weights_of_an_outvoted_replica_are_replaced_under_the_same_version(
    publishing: Publishing, receiving: ReceivingEnd
) -> None:
    publishing.publish(5)
    join(publishing, receiving, 1, 5)
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
    publishing: Publishing, receiving: ReceivingEnd
) -> None:
    publishing.publish(1)
    for epoch in (1, 2):
        join(publishing, receiving, epoch)
        until(lambda epoch=epoch: publishing.publisher.formed_generations() == [epoch])
        if epoch == 1:
            assert receiving.next_version() == 1
            until(lambda: receiving.receiver.version == 1)
    with pytest.raises(queue.Empty):
        receiving.next_version(timeout_s=0.3)
    publishing.publish(2)
    assert receiving.next_version() == 2


def test_an_engine_that_fails_to_load_ends_the_link_and_not_the_receiver(
    publishing: Publishing, receiving: Receiving
) -> None:
    receiving.load_error = ValueError("no such parameter")
    publishing.publish(1)
    join(publishing, receiving, 1)
    assert receiving.failure()[0] == 1
    assert publishing.errors.get(timeout=patient(60)) == 1
    assert receiving.receiver.version == -1
    join(publishing, receiving, 2)
    assert receiving.next_version() == 1


def test_a_publisher_killed_mid_send_leaves_the_old_version_and_a_usable_receiver(
    publishing: Publishing, receiving: Receiving, start_peer: StartPeer
) -> None:
    publishing.publish(3)
    join(publishing, receiving, 1)
    assert receiving.next_version() == 3
    sender = start_peer("half-sender", 2)
    receiving.receiver.set_link(link(2))
    assert weight_link_peer.next_line(sender) == {"sent": "half"}
    sender.kill()
    assert receiving.failure()[0] == 2
    assert receiving.receiver.version == 3
    assert receiving.staged.empty()
    join(publishing, receiving, 3)
    publishing.publish(4)
    assert receiving.next_version() == 4


def test_a_stopped_publisher_is_left_for_the_next_link(
    publishing: Publishing, receiving: Receiving, start_peer: StartPeer
) -> None:
    sender = start_peer("half-sender", 1)
    receiving.receiver.set_link(link(1))
    assert weight_link_peer.next_line(sender) == {"sent": "half"}
    sender.send_signal(signal.SIGSTOP)
    publishing.publish(8)
    join(publishing, receiving, 2)
    assert receiving.next_version(timeout_s=patient(5)) == 8
    assert receiving.errors.empty()


def test_a_stopped_receiver_delays_nobody(
    publishing: Publishing, receiving: Receiving, start_peer: StartPeer
) -> None:
    stopped = start_peer("receiver", 1)
    publishing.publisher.set_links([link(1), link(2)])
    receiving.receiver.set_link(link(2))
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


def test_a_killed_receiver_is_reported_once(publishing: Publishing, start_peer: StartPeer) -> None:
    victim = start_peer("receiver", 1)
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
    assert publishing.publisher.formed_generations() == []


def test_close_ends_every_thread(publishing: Publishing, receiving: Receiving) -> None:
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


def publish_large(publishing: Publishing, version: int) -> float:
    """More than socket buffers hold, so that a stopped receiver does stop its sender."""
    weights = weights_of(version, elements=8_000_000)
    return publishing.publisher.publish(version, weights.items())
