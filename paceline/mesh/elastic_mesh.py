"""Elastic mesh: one process group per epoch, formed, used and abandoned without ever hanging.

Invariants:

- Every wait ends within one slice (20 ms) of ``cancelled()`` turning true, whatever the peers do.
- abandon() never blocks, and reaches the peers: their operations of this epoch fail as well. The
  same holds if a member's process ends. NCCL's own operations would wait for it for ever, so a mesh
  watches the connections of its gloo side.
- When an operation or wait() raises, the buffers handed to the mesh hold garbage: reduce a scratch
  copy. Nothing writes to them any more, unless ``settled`` is false: then an operation could not be
  ended, and the mesh keeps its memory for good.
- An abandoned group is dropped once no operation of it is running. So any number of rebuilds leaves
  threads, descriptors and memory as they were.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.mesh.gloo_backend import GlooBackend, Handle
from paceline.mesh.nccl_backend import NcclBackend
from paceline.mesh.process_group_forming import SLICE_S, Forming, graveyard
from paceline.mesh.rendezvous import EpochCancelled, MeshError, MeshMember
from paceline.process import threads
from paceline.process.structured_log import event, first_line

__all__ = ["EpochCancelled", "Handle", "MeshError", "ProcessMesh"]

_log = logging.getLogger(__name__)

_NCCL_SETTLE_S = 10.0
"""Aborting NCCL communicators takes seconds (2.5 s for four on an H200)."""

_SETTLE_S = 1.0
"""A severed operation ends within milliseconds or never: gloo fails those that wait for a message,
and forgets one whose message is being received or sent at that moment. This happens when a stopped
member wakes up: it reads what its peers had sent, answers into a closed connection, and waits for
ever."""


@dataclass(eq=False)
class ProcessMesh:
    """The members of one epoch. Operations are to be started in the same order by every member.
    Buffers are contiguous tensors, on the host or on ``device``. Not for concurrent use, except
    that any thread may call abandon()."""

    rank: int
    size: int
    device: torch.device
    cancelled: Callable[[], bool]
    host_side: GlooBackend | None = None
    device_side: NcclBackend | None = None

    def __post_init__(self) -> None:
        self._abandoned = threading.Event()
        self._running: list[Handle] = []
        self._settle_s = _SETTLE_S if self.device_side is None else _NCCL_SETTLE_S
        self.settled = True
        """False if an operation of this mesh, now abandoned, did not end: the owner of a buffer
        that was handed to it must drop the buffer and allocate another. The mesh keeps it alive."""
        threads.on_exit(self.abandon)

    @classmethod
    def form(
        cls,
        *,
        url: str,
        key: str,
        rank: int,
        size: int,
        device: torch.device,
        cancelled: Callable[[], bool],
        timeout_s: float = 60.0,
        host: str | None = None,
    ) -> "ProcessMesh":
        """Meets the other members under the Redis key ``key`` and connects to them.

        ``url``: Redis URL of the rendezvous. ``key``: new for every epoch; it is good for one try.
        ``device``: where this member computes; CUDA buffers go over NCCL if every member has a
        CUDA device of its own, else through host memory over gloo. ``host``: address at which the
        others reach this member; default: the one on the way to Redis. An explicit
        GLOO_SOCKET_IFNAME in the environment goes first. A mesh of size 1 has no rendezvous.

        Raises EpochCancelled, or MeshError when members are missing after ``timeout_s`` seconds.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not within a mesh of {size}")
        if device.type == "cuda" and device.index is None:
            raise ValueError("a CUDA device of a mesh needs an index: NCCL finds no buffer without")
        if size == 1:
            return cls(rank, size, device, cancelled)
        member = MeshMember(rank, size, device, host or "", timeout_s)
        return cls(rank, size, device, cancelled, *Forming(url, key, member).result(cancelled))

    def all_reduce(self, buffer: Tensor) -> None:
        """Replaces ``buffer`` by its sum over all members. The same shape and dtype everywhere."""
        self.wait(self.all_reduce_async(buffer))

    def all_reduce_async(self, buffer: Tensor) -> Handle:
        """Starts all_reduce(); ``buffer`` belongs to the mesh until wait() returns or raises."""
        return self._start(buffer, lambda side, b: side.all_reduce(b))

    def send(self, buffer: Tensor, peer: int) -> None:
        """Sends ``buffer`` to rank ``peer``, which receives into one of the same size."""
        self.wait(self.send_async(buffer, peer))

    def send_async(self, buffer: Tensor, peer: int) -> Handle:
        """Starts send(). Operations with one peer end in the order they were started."""
        return self._start(buffer, lambda side, b: side.send(b, peer), back=False)

    def recv(self, buffer: Tensor, peer: int) -> None:
        """Fills ``buffer`` with what rank ``peer`` sends."""
        self.wait(self.recv_async(buffer, peer))

    def recv_async(self, buffer: Tensor, peer: int) -> Handle:
        return self._start(buffer, lambda side, b: side.recv(b, peer))

    def wait(self, handle: Handle) -> None:
        """Blocks until the operation has ended. Raises EpochCancelled when the epoch is over,
        MeshError when the operation failed; after either the mesh is abandoned and the content of
        all its buffers garbage. They are free for reuse if the mesh is ``settled``."""
        while not handle.poll(SLICE_S):
            if self.cancelled():
                self.abandon()
                self._settle()
                raise EpochCancelled("cancelled during an operation")
            host_side = self.host_side
            # Over NVLink and shared memory no error comes from NCCL: its kernel waits for ever.
            if self.device_side is not None and host_side is not None and host_side.lost_peer():
                raise self._failed(MeshError("the process of another member has ended"))
        try:
            handle.result()
        except Exception as error:
            raise self._failed(error) from error
        if handle in self._running:
            self._running.remove(handle)

    def abandon(self) -> None:
        """Ends the epoch for this member: operations fail, peers notice. Never blocks."""
        if self._abandoned.is_set():
            return
        self._abandoned.set()
        sides = [s for s in (self.host_side, self.device_side) if s is not None]
        for side in sides:
            side.sever()
        if sides:
            graveyard.bury(sides, self._running)
        # The graveyard holds the last references: only there may a group be dropped.
        self.host_side = self.device_side = None

    def __del__(self) -> None:
        self.abandon()

    def _start(
        self, buffer: Tensor, start: Callable[[Any, Tensor], Handle], back: bool = True
    ) -> Handle:
        if not buffer.is_contiguous():
            raise ValueError("a mesh buffer must be contiguous")
        host_side, device_side = self.host_side, self.device_side
        if self._abandoned.is_set() or self.cancelled():
            self.abandon()
            # Operations started before this one may still write to their buffers.
            self._settle()
            raise EpochCancelled("the epoch is over")
        if self.size == 1:
            return _Done()
        handle: Handle
        try:
            if buffer.device.type == "cpu":
                handle = start(host_side, buffer)
            elif device_side is not None:
                handle = start(device_side, buffer)
            else:
                staged = buffer.to("cpu")
                handle = start(host_side, staged)
                if back:
                    handle = _CopyBack(handle, staged, buffer)
        except RuntimeError as error:
            raise self._failed(error) from error
        self._running.append(handle)
        return handle

    def _failed(self, error: Exception) -> EpochCancelled | MeshError:
        over = self._abandoned.is_set() or self.cancelled()
        self.abandon()
        self._settle()
        if over:
            return EpochCancelled("cancelled during an operation")
        return MeshError(first_line(error))

    def _settle(self) -> None:
        """Waits until no operation runs any more, or until it is clear that one never ends."""
        deadline = time.monotonic() + self._settle_s
        for handle in self._running:
            while self.settled and not handle.poll(SLICE_S):
                self.settled = time.monotonic() < deadline
        if self.settled:
            self._running.clear()
        else:
            # The abandoned group keeps its running operations, and they keep their buffers.
            event(_log, "operation does not end", logging.WARNING, rank=self.rank)


class _Done:
    def poll(self, seconds: float) -> bool:
        return True

    def result(self) -> None:
        return None


@dataclass(eq=False)
class _CopyBack:
    """Handle of an operation on a device buffer that goes through host memory."""

    _inner: Handle
    _staged: Tensor
    _buffer: Tensor

    def poll(self, seconds: float) -> bool:
        return self._inner.poll(seconds)

    def result(self) -> None:
        self._inner.result()
        self._buffer.copy_(self._staged)
