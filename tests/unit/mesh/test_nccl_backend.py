"""The NCCL transport against an imitation that refuses what NCCL refuses, without a GPU."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.mesh import elastic_mesh as mesh_module
from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from paceline.mesh.gloo_backend import FOREVER
from paceline.mesh.nccl_backend import NcclBackend, agree_on_nccl
from paceline.mesh.rendezvous import MeshMember
from paceline.rpc.addresses import LOOPBACK, interface_of
from tests.fakes import nccl

DEADLINE_S = 60.0
SIDES: list[NcclBackend] = []
"""Those that the test has formed."""


@dataclass
class Meeting:
    """A rendezvous of members in one process, who hear rank 0 alone."""

    values: dict[int, bytes] = field(default_factory=dict)
    said: threading.Condition = field(default_factory=threading.Condition)

    def exchange(self, topic: str, rank: int, value: bytes, size: int) -> list[bytes]:
        with self.said:
            self.values[rank] = value
            self.said.notify_all()
            assert self.said.wait_for(lambda: 0 in self.values, DEADLINE_S)
        return [self.values[0]] + [b""] * (size - 1)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[nccl.Machine]:
    SIDES.clear()
    yield from nccl.install(monkeypatch)
    for side in SIDES:
        side.sever()


def gpu(rank: int) -> torch.device:
    return torch.device("cuda", rank)


def member(rank: int = 0, size: int = 2, **fields: Any) -> MeshMember:
    defaults = {"device": gpu(rank), "host": "127.0.0.1", "timeout_s": DEADLINE_S}
    return MeshMember(rank, size, **(defaults | fields))


@dataclass(eq=False)
class Forming:
    """A member that forms its side in a thread of its own."""

    meeting: Any
    member: MeshMember
    made: list[NcclBackend] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            with FakeTensorMode():
                NcclBackend(self.meeting, self.member, self.made.append)
        except Exception as error:
            self.error = error

    def result(self) -> NcclBackend:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.made[0]


def formed(**fields: Any) -> tuple[NcclBackend, ...]:
    """The sides of two members."""
    meeting = Meeting()
    members = [Forming(meeting, member(rank, **fields)) for rank in (0, 1)]
    sides = tuple(each_member.result() for each_member in members)
    SIDES.extend(sides)
    return sides


class Pair:
    """Member 0 of a formed mesh of two, its side and the side of member 1."""

    def __init__(self, machine: nccl.Machine, **fields: Any) -> None:
        self.over = threading.Event()
        self.side, self.other = formed(**fields)
        self.group, self.other_group = sorted(machine.groups, key=lambda group: group.rank)
        self.host = Host()
        self.mesh = ProcessMesh(0, 2, gpu(0), self.over.is_set, self.host, self.side)  # type: ignore[arg-type]
        self.first = len(self.group.works)

    @property
    def works(self) -> list[tuple[str, nccl.Work]]:
        return self.group.works[self.first :]


class Host:
    """The gloo side, which sees when a peer's process ends."""

    def __init__(self) -> None:
        self.gone = threading.Event()

    def lost_peer(self) -> bool:
        return self.gone.is_set()

    def sever(self) -> None:
        self.gone.set()


@pytest.fixture
def here(machine: nccl.Machine) -> Iterator[Pair]:
    pair = Pair(machine)
    yield pair
    pair.mesh.abandon()


def buffer(rank: int = 0) -> Tensor:
    with FakeTensorMode():
        return torch.empty(8, device=gpu(rank))


def test_the_communicator_does_not_block_and_is_connected_when_the_mesh_has_formed(
    machine: nccl.Machine,
) -> None:
    formed()
    for group in machine.groups:
        assert group.options.config.blocking == 0
        assert group.options._timeout == FOREVER, "the mesh decides how long it waits"
        assert group.works and all(work.waited for _, work in group.works)
    assert len({group.store.port for group in machine.groups}) == 1, "that of rank 0"
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "60"
    # Neither watchdog nor monitor ends a survivor.
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "PROPAGATE_ERROR"):
        assert os.environ[f"TORCH_NCCL_{name}"] == "0"


@pytest.mark.parametrize(("given", "used"), [("", f"={LOOPBACK}"), ("slow0", "slow0")])
def test_nccl_uses_the_interface_that_has_the_members_address(
    machine: nccl.Machine, monkeypatch: pytest.MonkeyPatch, given: str, used: str
) -> None:
    if given:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", given)
    formed()
    assert os.environ["NCCL_SOCKET_IFNAME"] == used
    has = {"docker0": "172.17.0.1", "fast0": "10.1.2.3"}
    found = {name: [SimpleNamespace(address=address)] for name, address in has.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert [interface_of(host) for host in ("10.1.2.3", "10.9.9.9")] == ["fast0", ""]


def test_a_device_without_index_is_refused() -> None:
    with pytest.raises(ValueError, match="needs an index"):
        ProcessMesh.form(
            url="redis://127.0.0.1:1",
            key="k",
            rank=0,
            size=2,
            device=torch.device("cuda"),
            cancelled=lambda: False,
        )


@pytest.mark.parametrize(("memory_mb", "second"), [(600, 1), (80_000, 0)])
def test_a_communicator_that_the_machine_refuses_is_an_error(
    machine: nccl.Machine, memory_mb: int, second: int
) -> None:
    machine.free_mb = memory_mb
    meeting = Meeting()
    members = [
        Forming(meeting, member(0, timeout_s=1)),
        Forming(meeting, member(1, device=gpu(second), timeout_s=1)),
    ]
    for forming in members:
        forming.thread.join(0.1)
    for side in [side for forming in members for side in forming.made]:
        side.sever()
    for forming in members:
        with pytest.raises((MeshError, RuntimeError)):
            forming.result()


def test_a_peer_that_never_connects_leaves_who_forms_free_to_give_up() -> None:
    meeting = Meeting()
    alone = Forming(meeting, member(0))
    while not (nccl.Group.machine.groups and nccl.Group.machine.groups[0].device):
        alone.thread.join(0.005)
    alone.made[0].sever()
    with pytest.raises((MeshError, RuntimeError)):
        alone.result()


def test_an_operation_ends_when_the_device_says_so(here: Pair) -> None:
    handle = here.mesh.all_reduce_async(buffer())
    assert not handle.poll(0.0)
    with FakeTensorMode():
        here.other.all_reduce(buffer(1))
    here.mesh.wait(handle)
    ((_, work),) = here.works
    assert work.waited, "the caller's stream is made to wait for the result"


def test_a_buffer_of_another_device_ends_the_epoch(here: Pair) -> None:
    with pytest.raises(MeshError, match="Parent communicator missing"):
        here.mesh.all_reduce_async(buffer(1))


def test_a_peer_whose_process_ends_ends_the_wait_although_nccl_says_nothing(here: Pair) -> None:
    handle = here.mesh.all_reduce_async(buffer())
    here.host.gone.set()
    with pytest.raises(MeshError, match="has ended"):
        here.mesh.wait(handle)
    assert here.group.aborted.wait(DEADLINE_S) and here.mesh.settled


def test_a_wait_is_aborted_when_the_epoch_ends(here: Pair) -> None:
    handle = here.mesh.all_reduce_async(buffer())
    here.over.set()
    with pytest.raises(EpochCancelled):
        here.mesh.wait(handle)
    assert here.group.aborted.wait(DEADLINE_S)
    assert here.mesh.settled, "the aborted operation has ended, and its buffer is free"
    with pytest.raises(EpochCancelled):
        here.mesh.all_reduce_async(buffer())
    assert len(here.works) == 1


def test_an_abort_that_takes_longer_than_gloo_may_is_waited_for(
    machine: nccl.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "_SETTLE_S", 0.0)
    here = Pair(machine)
    here.group.may_abort.clear()
    handle = here.mesh.all_reduce_async(buffer())
    here.over.set()
    threading.Thread(
        target=lambda: (here.group.aborting.wait(DEADLINE_S), here.group.may_abort.set())
    ).start()
    with pytest.raises(EpochCancelled):
        here.mesh.wait(handle)
    assert here.mesh.settled, "scratch is not made anew while the old one lives"


def test_an_abort_that_waits_for_the_device_holds_nobody_up(
    machine: nccl.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "_NCCL_SETTLE_S", 0.05)
    here = Pair(machine)
    here.group.may_abort.clear()
    handle = here.mesh.all_reduce_async(buffer())
    here.over.set()
    with pytest.raises(EpochCancelled):
        here.mesh.wait(handle)
    assert here.group.aborting.wait(DEADLINE_S) and not here.group.aborted.is_set()
    assert not here.mesh.settled, "the device may still write to the buffer"


def test_any_thread_may_abandon_while_another_waits(here: Pair) -> None:
    handle = here.mesh.all_reduce_async(buffer())
    thread = threading.Thread(target=here.mesh.abandon)
    thread.start()
    with pytest.raises(EpochCancelled):
        here.mesh.wait(handle)
    thread.join(DEADLINE_S)
    assert here.group.aborted.wait(DEADLINE_S)


def test_an_epoch_is_aborted_once(here: Pair) -> None:
    here.mesh.abandon()
    assert here.group.aborted.wait(DEADLINE_S)
    here.group.aborting.clear()
    here.mesh.abandon()
    here.side.sever()
    assert not here.group.aborting.is_set()


def test_a_failed_operation_ends_the_epoch_with_its_reason(here: Pair) -> None:
    handle = here.mesh.all_reduce_async(buffer())
    ((_, work),) = here.works
    work.error = "NCCL error: remote process exited\nmore of it"
    work.ended.set()
    with pytest.raises(MeshError, match=r"remote process exited$"):
        here.mesh.wait(handle)
    assert here.group.aborted.wait(DEADLINE_S)


def test_an_operation_that_cannot_begin_ends_the_epoch(here: Pair) -> None:
    here.group.abort()
    with pytest.raises(MeshError, match="aborted"):
        here.mesh.all_reduce_async(buffer())


def test_a_group_that_is_given_up_while_it_is_made_never_connects(machine: nccl.Machine) -> None:
    sides: list[NcclBackend] = []
    machine.on_made = lambda: sides[0].sever()
    with pytest.raises(MeshError):
        NcclBackend(Meeting(), member(), sides.append)  # type: ignore[arg-type]
    assert machine.groups[0].device is None


DEVICES = [
    (["gpu-a", "gpu-b"], True, True),
    (["gpu-a", "gpu-b"], False, False),
    (["gpu-a", "gpu-a"], True, False),
    (["gpu-a", None], True, False),
    ([None, None], True, False),
]


@pytest.mark.parametrize(("uuids", "available", "agreed"), DEVICES)
def test_members_agree_on_nccl_if_each_has_a_device_of_its_own(
    uuids: list[str | None], available: bool, agreed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: available)
    answers = [ask(uuids, rank, monkeypatch) for rank in range(len(uuids))]
    assert answers == [agreed] * len(uuids)


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
