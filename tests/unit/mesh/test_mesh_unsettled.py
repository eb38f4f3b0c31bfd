"""Operations that cannot be ended: their memory is left to them, and the process lives on."""

import asyncio
import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

from paceline.mesh import elastic_mesh as mesh_module
from paceline.mesh.elastic_mesh import EpochCancelled, ProcessMesh
from paceline.process.structured_log import first_line
from paceline.process.threads import BackgroundLoop

CPU = torch.device("cpu")


def test_errors_of_torch_lose_their_source_location_and_advice() -> None:
    text = "[../third_party/gloo/pair.cc:525] Read error. This is typically caused by a firewall"
    assert first_line(RuntimeError(text)) == "Read error"


def test_a_background_loop_does_not_wait_for_itself() -> None:
    loop = BackgroundLoop()

    async def calls_run() -> None:
        loop.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="wait for itself"):
        loop.run(calls_run(), timeout_s=30)
    loop.close()


class Stuck:
    """An operation that ends when it is told to, as gloo's may never do."""

    def __init__(self, buffer: Tensor, ended: threading.Event) -> None:
        self.buffer, self.ended = buffer, ended

    def poll(self, seconds: float) -> bool:
        return self.ended.wait(seconds)

    def result(self) -> None:
        raise RuntimeError("it ended badly")


class Side:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.severed = threading.Event()

    def all_reduce(self, buffer: Tensor) -> Stuck:
        return Stuck(buffer, self.ended)

    def sever(self) -> None:
        self.severed.set()


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Side:
    monkeypatch.setattr(mesh_module, "_SETTLE_S", 0.05)
    return Side()


def cancelled_mesh(side: Side, buffer: Tensor) -> ProcessMesh:
    """A mesh whose epoch ends while it reduces ``buffer``."""
    over = threading.Event()
    mesh = ProcessMesh(0, 2, CPU, over.is_set, side)  # type: ignore[arg-type]
    handle = mesh.all_reduce_async(buffer)
    over.set()
    with pytest.raises(EpochCancelled):
        mesh.wait(handle)
    return mesh


def test_an_operation_that_does_not_end_keeps_its_buffer_and_says_so(side: Side) -> None:
    others = set(threading.enumerate())
    buffer = torch.ones(1000)
    lives = weakref.ref(buffer)
    mesh = cancelled_mesh(side, buffer)
    assert side.severed.is_set()
    assert not mesh.settled
    del buffer, mesh
    assert lives() is not None, "gloo may still write there"
    side.ended.set()
    wait_until_dropped(others)
    assert lives() is None, "what ends late is dropped then"


def test_nothing_is_started_on_a_mesh_that_did_not_settle(side: Side) -> None:
    mesh = cancelled_mesh(side, torch.ones(10))
    with pytest.raises(EpochCancelled):
        mesh.all_reduce_async(torch.ones(10))
    assert not mesh.settled
    side.ended.set()


def wait_until_dropped(others: set[threading.Thread]) -> None:
    """``others``: threads of earlier tests, whose operations may never end."""
    for thread in set(threading.enumerate()) - others:
        if thread.name == "mesh-drop":
            thread.join(60)
    # The exception of the operation and its frames refer to each other.
    gc.collect()
