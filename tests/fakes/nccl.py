"""NCCL as torch gives it, without GPUs: it refuses what the real one refuses, and hangs where the
real one hangs.

- A communicator is in progress after eager_connect, and the first operation blocks its caller until
  every rank has connected.
- Buffers are of the communicator's device, which has an index. Two ranks never share a device.
- An operation that a peer does not join never ends, and no error comes. It ends when the
  communicator here is aborted; abort() waits for the device as long as the test says.
- Each communicator takes half a gigabyte of its device.

``join`` gives the meshes of a process communicators of this kind. Memory of the host then stands
for that of the devices: operations move it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from paceline.mesh import process_group_forming
from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.mesh.nccl_backend import NcclBackend
from paceline.mesh.rendezvous import MeshMember, Rendezvous

COMMUNICATOR_MB = 500
LIMIT_S = 60.0


class Work:
    """An operation on a device. It can be asked, not awaited."""

    def __init__(self, group: Group, buffer: Tensor, sends: bool) -> None:
        self.group, self.buffer, self.sends = group, buffer, sends
        self.ended = threading.Event()
        self.error = ""
        self.waited = False

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        assert self.ended.is_set(), "a wait that blocks cannot be ended"
        self.waited = True
        if self.error:
            raise RuntimeError(self.error)


class Machine:
    """The devices, and the operations that wait there for a peer."""

    def __init__(self, memory_mb: int = 80_000) -> None:
        self.free_mb = memory_mb
        self.groups: list[Group] = []
        self.changed = threading.Condition()
        self.on_made: Callable[[], None] = lambda: None
        self._waiting: dict[tuple[Any, ...], list[Work]] = {}
        self._connected: dict[int, list[tuple[int, torch.device]]] = {}

    def connect(self, port: int, rank: int, device: torch.device) -> None:
        with self.changed:
            members = self._connected.setdefault(port, [])
            if any(other == device for _, other in members):
                raise RuntimeError("Duplicate GPU detected")
            if self.free_mb < COMMUNICATOR_MB:
                raise RuntimeError("NCCL error: unhandled cuda error: out of memory")
            self.free_mb -= COMMUNICATOR_MB
            members.append((rank, device))
            self.changed.notify_all()

    def is_connected(self, port: int, size: int) -> bool:
        return len(self._connected.get(port, ())) == size

    def post(self, key: tuple[Any, ...], work: Work, parties: int) -> None:
        with self.changed:
            works = self._waiting.setdefault(key, [])
            works.append(work)
            if len(works) == parties and not any(w.group.aborting.is_set() for w in works):
                _move(*self._waiting.pop(key))


def _move(*works: Work) -> None:
    """Between the buffers of an operation that all its parties have joined."""
    if not isinstance(works[0].buffer, FakeTensor):
        with torch._C.DisableTorchFunctionSubclass():
            sent = [work.buffer for work in works if work.sends]
            found = torch.stack(sent).sum(0) if len(sent) > 1 else sent[0].clone()
            for work in works:
                work.buffer.copy_(found)
    for work in works:
        work.ended.set()


class Options:
    def __init__(self) -> None:
        self.config = SimpleNamespace(blocking=1, max_ctas=32)
        self._timeout: Any = None


class Group:
    """ProcessGroupNCCL."""

    machine: Machine
    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.device: torch.device | None = None
        self.works: list[tuple[str, Work]] = []
        self.aborting, self.aborted, self.may_abort = (threading.Event() for _ in range(3))
        self.may_abort.set()
        self._posted: Counter[tuple[Any, ...]] = Counter()
        machine = self.machine = type(self).machine
        machine.groups.append(self)
        machine.on_made()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.device = device
        self.machine.connect(self.store.port, self.rank, device)

    def allreduce(self, buffers: list[Tensor]) -> Work:
        return self._start("allreduce", buffers, ("allreduce",), self.size, sends=True)

    def send(self, buffers: list[Tensor], peer: int, tag: int) -> Work:
        return self._start(f"send {peer}", buffers, (self.rank, peer), 2, sends=True)

    def recv(self, buffers: list[Tensor], peer: int, tag: int) -> Work:
        return self._start(f"recv {peer}", buffers, (peer, self.rank), 2, sends=False)

    def _start(
        self,
        name: str,
        buffers: list[Tensor],
        route: tuple[Any, ...],
        parties: int,
        *,
        sends: bool,
    ) -> Work:
        if self.aborted.is_set():
            raise RuntimeError(f"NCCL communicator was aborted on rank {self.rank}.")
        if self.device is None or any(buffer.device != self.device for buffer in buffers):
            raise RuntimeError("Parent communicator missing in eager initialization mode.")
        with self.machine.changed:
            ready = self.machine.changed.wait_for(
                lambda: (
                    self.machine.is_connected(self.store.port, self.size) or self.aborting.is_set()
                ),
                LIMIT_S,
            )
        if self.aborting.is_set() or not ready:
            raise RuntimeError("NCCL communicator was aborted while it was in progress")
        self._posted[route] += 1
        work = Work(self, *buffers, sends)
        self.works.append((name, work))
        key = (self.store.port, *route, self._posted[route])
        self.machine.post(key, work, parties)
        return work

    def abort(self) -> None:
        self.aborting.set()
        with self.machine.changed:
            self.machine.changed.notify_all()
        assert self.may_abort.wait(LIMIT_S)
        self.aborted.set()
        self.machine.free_mb += COMMUNICATOR_MB
        for _, work in self.works:
            work.ended.set()


class _OnDevice(Tensor):
    """Memory of the host that says it is a device's."""

    place: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place


def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A machine whose communicators NcclBackend makes. What it made is aborted afterwards."""
    machine = Machine()
    monkeypatch.setattr(Group, "machine", machine, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
    for name in [n for n in os.environ if n.startswith(("TORCH_NCCL_", "NCCL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # Restored afterwards
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    yield machine
    for group in machine.groups:
        group.may_abort.set()
        group.abort()


def join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of one process have a device each, by rank. With those of other processes they meet
    over gloo alone."""
    make, connect, start = NcclBackend.__init__, NcclBackend._connect, ProcessMesh._start

    def agree(meeting: Rendezvous, member: MeshMember) -> bool:
        said = f"{os.getpid()}".encode()
        heard = meeting.exchange("device", member.rank, said, member.size)
        return set(heard) == {said}

    def made(side: NcclBackend, meeting: Any, member: MeshMember, note: Any) -> None:
        make(side, meeting, replace(member, device=torch.device("cuda", member.rank)), note)

    def connected(side: NcclBackend, member: MeshMember) -> None:
        with FakeTensorMode():
            connect(side, member)

    def started(mesh: ProcessMesh, buffer: Tensor, *arguments: Any, **options: Any) -> Any:
        if mesh.device_side is not None:
            buffer = buffer.detach().as_subclass(_OnDevice)
            buffer.place = torch.device("cuda", mesh.rank)
        return start(mesh, buffer, *arguments, **options)

    monkeypatch.setattr(process_group_forming, "agree_on_nccl", agree)
    monkeypatch.setattr(NcclBackend, "__init__", made)
    monkeypatch.setattr(NcclBackend, "_connect", connected)
    monkeypatch.setattr(ProcessMesh, "_start", started)
