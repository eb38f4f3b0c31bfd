"""A relay that is killed, or stopped, in the middle of a bucket: those below it go on elsewhere, at
that bucket."""

import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from paceline.mesh import severable_sockets
from policy_worker.publisher import WeightPublisher
from testbed.patience import patient
from testbed.workers import weight_link_peer
from tests.fixtures.weight_links import CPU, ReceivingEnd, link
from tests.process.weights.conftest import StartPeer

BUCKET, BUCKETS = 24 << 20, 5
"""A bucket is several times what kernels keep of a connection, so that a stopped relay's ends in
its middle."""
PACE = 12 << 20
"""Bytes a second of the relay."""
STALL_S = 8.0
"""Much longer than a bucket takes."""
_TCP_BYTES_RECEIVED = 128
"""Place of tcpi_bytes_received in the kernel's struct tcp_info."""


def received() -> int:
    """Bytes that have come over connections of this process, by the fullest of them."""
    counts = [0]
    for end, listening, *_ in severable_sockets._tcp_sockets():
        if listening:
            continue
        copy = severable_sockets._duplicate(end.descriptor)
        if copy is not None:
            with copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                counts.append(struct.unpack_from("Q", info, _TCP_BYTES_RECEIVED)[0])
    return max(counts)


class Child(ReceivingEnd):
    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(url, run_id, relays=True, stall_s=STALL_S, host="127.0.0.1")


class Tree:
    """Trainer to a slow relay in a process of its own, to a child, to a grandchild: links 1, 2 and
    3."""

    def __init__(self, url: str, run_id: str, start_peer: StartPeer, stack: ExitStack) -> None:
        self.weights = torch.arange(BUCKET * BUCKETS // 4, dtype=torch.int32)
        self.trainer = WeightPublisher(
            url=url,
            run_id=run_id,
            device=CPU,
            on_link_error=lambda epoch, detail: None,
            bucket_bytes=BUCKET,
            host="127.0.0.1",
        )
        stack.callback(self.trainer.close)
        self.relay = start_peer(
            "receiver", 1, relays=[2], stall_s=STALL_S, host="127.0.0.1", pace=PACE
        )
        self.child, self.grandchild = Child(url, run_id), Child(url, run_id)
        for each in (self.child, self.grandchild):
            stack.callback(each.receiver.close)
        self.trainer.set_links([link(1)])
        self.trainer.publish(1, [("w", self.weights)])
        assert weight_link_peer.next_line(self.relay)["version"] == 1, "the relay has all of it"
        self.child.receiver.set_link(link(2, relayed=True), 1)
        assert self.child.receiver.relay is not None
        self.child.receiver.relay.set_links([link(3)])
        self.grandchild.receiver.set_link(link(3, relayed=True), 1)


@pytest.fixture
def tree(url: str, request: pytest.FixtureRequest, start_peer: StartPeer) -> Iterator[Tree]:
    with ExitStack() as stack:
        yield Tree(url, request.node.name, start_peer, stack)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_go_on_at_the_bucket_that_was_cut(tree: Tree, number: signal.Signals) -> None:
    child, deadline = tree.child, time.monotonic() + patient(60)
    while not (child.buckets == 1 and received() > 1.25 * BUCKET):
        assert child.buckets < 2 and time.monotonic() < deadline
        threading.Event().wait(0.005)
    tree.relay.send_signal(number)
    epoch, detail = child.errors.get(timeout=patient(90))
    assert epoch == 2
    if number == signal.SIGSTOP:
        assert "relays weights and sent nothing for" in detail
    assert child.buckets == 1, "half of the second one counts for nothing"
    tree.trainer.set_links([link(1), link(4)])
    child.receiver.set_link(link(4), 1)
    for each in (child, tree.grandchild):
        each.gets(1, {"w": tree.weights})
    assert tree.grandchild.errors.empty(), "its own source never failed"
    while not tree.trainer.resumed:
        assert time.monotonic() < deadline + 120
        threading.Event().wait(0.01)
    assert tree.trainer.sent_bytes == (2 * BUCKETS - 1) * BUCKET
