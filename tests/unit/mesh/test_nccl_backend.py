"""The NCCL transport against a process group that behaves as NCCL's does, without a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.mesh import elastic_mesh as mesh_module
from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from paceline.mesh.gloo_backend import FOREVER
from paceline.mesh.nccl_backend import NcclBackend, agree_on_nccl
from paceline.mesh.rendezvous import MeshMember

META = torch.device("meta")
"""Stands for a device: what is not on the host goes over the device's side."""
DEADLINE_S = 60.0


class Work:
    """An operation on a device: it can be asked, not awaited."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.ended = threading.Event()
        self.error = ""
        self.waited = False

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        self.waited = True
        if self.error:
            raise RuntimeError(self.error)


class Group:
    """ProcessGroupNCCL, with a communicator that ends its operations if it is aborted."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=1)
            self._timeout: Any = None

    made: list[Group]
    on_made: Callable[[], None]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.connected: list[torch.device] = []
        self.works: list[tuple[str, Work]] = []
        self.aborting = threading.Event()
        self.may_abort = threading.Event()
        self.may_abort.set()
        self.aborted = threading.Event()
        Group.made.append(self)
        Group.on_made()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)

    def _start(self, operation: str) -> Work:
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted on rank 0.")
        self.works.append((operation, Work(self)))
        return self.works[-1][1]

    def allreduce(self, buffers: list[Tensor]) -> Work:
        return self._start("allreduce")

    def send(self, buffers: list[Tensor], peer: int, tag: int) -> Work:
        return self._start(f"send {peer}")

    def recv(self, buffers: list[Tensor], peer: int, tag: int) -> Work:
        return self._start(f"recv {peer}")

    def abort(self) -> None:
        self.aborting.set()
        assert self.may_abort.wait(DEADLINE_S)
        self.aborted.set()
        for _, work in self.works:
            work.ended.set()


@dataclass
class Meeting:
    """A rendezvous of members in one process."""

    values: dict[str, bytes] = field(default_factory=dict)

    def put(self, name: str, value: bytes) -> None:
        self.values[name] = value

    def get(self, names: Iterable[str]) -> list[bytes]:
        return [self.values[name] for name in names]


@pytest.fixture(autouse=True)
def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Group.made, Group.on_made = [], lambda: None
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", raising=False)
    yield
    for group in Group.made:
        group.may_abort.set()


def member(rank: int = 0, size: int = 2) -> MeshMember:
    return MeshMember(rank, size, META, "127.0.0.1", timeout_s=DEADLINE_S)


def backend() -> NcclBackend:
    return NcclBackend(Meeting(), member(), lambda side: None)  # type: ignore[arg-type]


@dataclass
class Member:
    """A formed mesh of two, and what is behind it."""

    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.side = backend()
        self.group = Group.made[-1]
        self.mesh = ProcessMesh(0, 2, META, self.over.is_set, device_side=self.side)

    def buffer(self) -> Tensor:
        return torch.empty(8, device=META)


def test_the_communicator_does_not_block_and_connects_while_it_forms() -> None:
    side = backend()
    (group,) = Group.made
    assert group.options.config.blocking == 0
    assert group.options._timeout == FOREVER, "the mesh decides how long it waits"
    assert group.connected == [META]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "the watchdog ends processes"
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "60"
    side.sever()


def test_members_meet_at_the_store_of_rank_0() -> None:
    meeting = Meeting()
    first = NcclBackend(meeting, member(0), lambda side: None)  # type: ignore[arg-type]
    second = NcclBackend(meeting, member(1), lambda side: None)  # type: ignore[arg-type]
    ports = {group.store.port for group in Group.made}
    assert len(ports) == 1 and [group.rank for group in Group.made] == [0, 1]
    first.sever()
    second.sever()


def test_an_operation_ends_when_the_device_says_so() -> None:
    here = Member()
    handle = here.mesh.all_reduce_async(here.buffer())
    assert not handle.poll(0.0)
    ((_, work),) = here.group.works
    work.ended.set()
    here.mesh.wait(handle)
    assert work.waited, "the caller's stream is made to wait for the result"
    here.mesh.abandon()


def test_operations_go_to_the_peer_that_was_named() -> None:
    here = Member()
    here.mesh.send_async(here.buffer(), 1)
    here.mesh.recv_async(here.buffer(), 1)
    assert [name for name, _ in here.group.works] == ["send 1", "recv 1"]
    here.mesh.abandon()


def test_a_wait_is_aborted_when_the_epoch_ends() -> None:
    here = Member()
    handle = here.mesh.all_reduce_async(here.buffer())
    here.over.set()
    with pytest.raises(EpochCancelled):
        here.mesh.wait(handle)
    assert here.group.aborted.wait(DEADLINE_S)
    assert here.mesh.settled, "the aborted operation has ended, and its buffer is free"
    with pytest.raises(EpochCancelled):
        here.mesh.all_reduce_async(here.buffer())
    assert len(here.group.works) == 1


def test_an_abort_that_waits_for_the_device_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh_module, "_SETTLE_S", 0.05)
    here = Member()
    here.group.may_abort.clear()
    handle = here.mesh.all_reduce_async(here.buffer())
    here.over.set()
    with pytest.raises(EpochCancelled):
        here.mesh.wait(handle)
    assert here.group.aborting.wait(DEADLINE_S) and not here.group.aborted.is_set()
    assert not here.mesh.settled, "the device may still write to the buffer"


def test_any_thread_may_abandon_while_another_waits() -> None:
    here = Member()
    handle = here.mesh.all_reduce_async(here.buffer())
    thread = threading.Thread(target=here.mesh.abandon)
    thread.start()
    with pytest.raises(EpochCancelled):
        here.mesh.wait(handle)
    thread.join(DEADLINE_S)
    assert here.group.aborted.wait(DEADLINE_S)


def test_an_epoch_is_aborted_once() -> None:
    here = Member()
    here.mesh.abandon()
    assert here.group.aborted.wait(DEADLINE_S)
    here.group.aborting.clear()
    here.mesh.abandon()
    here.side.sever()
    assert not here.group.aborting.is_set()


def test_a_failed_operation_ends_the_epoch_with_its_reason() -> None:
    here = Member()
    handle = here.mesh.all_reduce_async(here.buffer())
    ((_, work),) = here.group.works
    work.error = "NCCL error: remote process exited\nmore of it"
    work.ended.set()
    with pytest.raises(MeshError, match=r"remote process exited$"):
        here.mesh.wait(handle)
    assert here.group.aborted.wait(DEADLINE_S)


def test_an_operation_that_cannot_begin_ends_the_epoch() -> None:
    here = Member()
    here.group.abort()
    with pytest.raises(MeshError, match="aborted"):
        here.mesh.all_reduce_async(here.buffer())


def test_a_group_that_is_given_up_while_it_is_made_never_connects() -> None:
    sides: list[NcclBackend] = []
    Group.on_made = lambda: sides[0].sever()
    with pytest.raises(MeshError):
        NcclBackend(Meeting(), member(), sides.append)  # type: ignore[arg-type]
    assert Group.made[0].connected == []


DEVICES = [
    (["gpu-a", "gpu-b"], True),
    (["gpu-a", "gpu-a"], False),
    (["gpu-a", None], False),
    ([None, None], False),
]


@pytest.mark.parametrize(("uuids", "agreed"), DEVICES)
def test_members_agree_on_nccl_if_each_has_a_device_of_its_own(
    uuids: list[str | None], agreed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    answers = [ask(uuids, rank, monkeypatch) for rank in range(len(uuids))]
    assert answers == [agreed] * len(uuids)


def test_members_without_nccl_take_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert not ask(["gpu-a", "gpu-b"], 0, monkeypatch)


def ask(uuids: list[str | None], rank: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The answer of member ``rank`` at a meeting of members with these devices; None: no GPU."""
    said: dict[int, bytes] = {}

    def exchange(topic: str, peer: int, value: bytes, size: int) -> list[bytes]:
        said[peer] = value
        return [said.get(other, b"") for other in range(size)]

    meeting: Any = SimpleNamespace(exchange=exchange)
    for peer in (*(p for p in range(len(uuids)) if p != rank), rank):
        device = torch.device("cpu" if uuids[peer] is None else "cuda:0")
        properties = SimpleNamespace(uuid=uuids[peer])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        present = MeshMember(peer, len(uuids), device, "127.0.0.1", timeout_s=DEADLINE_S)
        answer = agree_on_nccl(meeting, present)
    return answer
