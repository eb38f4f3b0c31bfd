"""Who may touch a buffer when: both members in one process, on real connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from paceline.mesh.severable_sockets import listeners
from tests.fixtures.meshes import Members, on_all
from tests.fixtures.weight_links import until

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("transport")
LARGE = 4_000_000


@pytest.fixture
def pair(url: str, request: pytest.FixtureRequest) -> Iterator[Members]:
    pair = Members(url, request.node.name)
    yield pair
    pair.close()


def test_buckets_reduce_in_the_order_they_were_started(pair: Members) -> None:
    def reduce(rank: int) -> None:
        mesh, buffer = pair.meshes[rank], buffers[rank]
        running = [mesh.all_reduce_async(bucket) for bucket in buffer.split(1000)]
        for handle in running:
            mesh.wait(handle)

    buffers = [torch.arange(10_000.0), torch.ones(10_000)]
    assert on_all(2, reduce) == [None, None]
    assert torch.equal(buffers[0], torch.arange(10_000.0) + 1)
    assert torch.equal(buffers[1], buffers[0])


def test_a_formed_mesh_admits_nobody_who_comes_later(
    url: str, request: pytest.FixtureRequest
) -> None:
    """10,050 idle connections would use up the open files, and gloo ends the process then."""
    before = listeners()
    pair = Members(url, request.node.name)
    # The store of a NCCL group, torch's own, goes on listening: its threads may connect anew.
    stores = {mesh.device_side._store.port for mesh in pair.meshes if mesh.device_side is not None}
    opened = [address for found, address in listeners().items() if found not in before]
    bound = [address for address in opened if address[1] not in stores]
    assert len(bound) == 2
    for address in bound:
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.2)
    assert on_all(2, lambda rank: pair.meshes[rank].all_reduce(torch.ones(9))) == [None, None]
    pair.close()


def test_a_member_sees_at_once_that_another_has_left(
    url: str, request: pytest.FixtureRequest
) -> None:
    four = Members(url, request.node.name, size=4)
    sides = [mesh.host_side for mesh in four.meshes]
    buffers = [torch.ones(LARGE) for _ in sides]
    on_all(4, lambda rank: four.meshes[rank].all_reduce(buffers[rank]))
    assert [side is not None and side.lost_peer() for side in sides] == [False] * 4
    four.meshes[1].abandon()
    for rank in (0, 2, 3):
        side = four.meshes[rank].host_side
        assert side is not None
        until(side.lost_peer)
        four.meshes[rank].abandon()


@pytest.mark.parametrize("moment", ["in a wait", "at a start"])
def test_cancelled_operations_leave_none_that_writes(pair: Members, moment: str) -> None:
    mesh, scratch = pair.meshes[0], torch.ones(4 * LARGE)
    buckets = scratch.split(LARGE)
    running = [mesh.all_reduce_async(bucket) for bucket in buckets[:3]]
    # The other member is in the middle of the first bucket and slow in the rest.
    pair.meshes[1].all_reduce_async(torch.ones(LARGE))
    pair.over[0].set()
    with pytest.raises(EpochCancelled):
        if moment == "at a start":
            mesh.all_reduce_async(buckets[3])
        for handle in running:
            mesh.wait(handle)
    assert mesh.settled == all(handle.poll(0) for handle in running)
    # Gloo may forget an operation whose message was under way: nobody may use its buffer then.
    if mesh.settled:
        scratch.fill_(5.0)
        threading.Event().wait(0.2)
        assert bool((scratch == 5.0).all())


def test_an_abandoned_mesh_starts_nothing(pair: Members) -> None:
    pair.meshes[0].abandon()
    pair.meshes[0].abandon()
    for operation in (
        lambda mesh, buffer: mesh.all_reduce(buffer),
        lambda mesh, buffer: mesh.send(buffer, 1),
        lambda mesh, buffer: mesh.recv(buffer, 1),
    ):
        with pytest.raises(EpochCancelled):
            operation(pair.meshes[0], torch.ones(4))
        # And its peer notices at once.
        with pytest.raises((MeshError, EpochCancelled)):
            operation(pair.meshes[1], torch.ones(4))


def test_abandon_from_another_thread_frees_a_wait(pair: Members) -> None:
    threading.Timer(0.1, pair.meshes[0].abandon).start()
    with pytest.raises(EpochCancelled):
        pair.meshes[0].recv(torch.ones(4), 1)


def test_a_buffer_with_gaps_is_refused_and_the_mesh_goes_on(pair: Members) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        pair.meshes[0].all_reduce_async(torch.ones(4, 4).t())
    sending = pair.meshes[0].send_async(torch.full((4,), 7.0), 1)
    received = torch.zeros(4)
    pair.meshes[1].recv(received, 0)
    pair.meshes[0].wait(sending)
    assert received.tolist() == [7.0] * 4


class SlowToEnd:
    """A transport whose operations go on for a while after they were severed."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def all_reduce(self, buffer: torch.Tensor) -> SlowToEnd:
        return self

    def sever(self) -> None:
        threading.Timer(0.2, self.ended.set).start()

    def poll(self, seconds: float) -> bool:
        return self.ended.wait(seconds)

    def result(self) -> None:
        raise RuntimeError("severed")


@pytest.mark.parametrize("moment", ["in a wait", "at a start"])
def test_cancellation_is_told_only_after_the_last_operation_has_ended(moment: str) -> None:
    over, transport = threading.Event(), SlowToEnd()
    mesh = ProcessMesh(0, 2, CPU, over.is_set, transport)  # type: ignore[arg-type]
    running = mesh.all_reduce_async(torch.ones(4))
    over.set()
    with pytest.raises(EpochCancelled):
        if moment == "in a wait":
            mesh.wait(running)
        else:
            mesh.all_reduce_async(torch.ones(4))
    assert transport.ended.is_set()
