"""NCCL as torch gives it, without GPUs: it refuses what the real one refuses, and hangs where the
real one hangs.

- A communicator is in progress after eager_connect, and the first operation blocks its caller until
  every rank has connected.
- Buffers are of the communicator's device, which has an index. Two ranks never share a device.
- An operation that a peer does not join never ends, and no error comes. It ends when the
  communicator here is aborted; abort() waits for the device as long as the test says.
- Each communicator takes half a gigabyte of its device.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

COMMUNICATOR_MB = 500
LIMIT_S = 60.0


class Work:
    """An operation on a device. It can be asked, not awaited."""

    def __init__(self, group: Group) -> None:
        self.group = group
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
            if len(works) == parties:
                for each_work in self._waiting.pop(key):
                    each_work.ended.set()


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
        return self._start("allreduce", buffers, ("allreduce",), self.size)

    def send(self, buffers: list[Tensor], peer: int, tag: int) -> Work:
        return self._start(f"send {peer}", buffers, (self.rank, peer), 2)

    def recv(self, buffers: list[Tensor], peer: int, tag: int) -> Work:
        return self._start(f"recv {peer}", buffers, (peer, self.rank), 2)

    def _start(
        self, name: str, buffers: list[Tensor], route: tuple[Any, ...], parties: int
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
        work = Work(self)
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
