"""NCCL backend: the mesh's process group for CUDA memory, with a nonblocking communicator.

The same promises as GlooBackend's: handles that can be polled, and sever() from any thread.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.mesh.gloo_backend import ABANDONED, FOREVER, Handle
from paceline.mesh.rendezvous import MeshError, MeshMember, Rendezvous, host_store
from paceline.process import threads
from paceline.process.compute_device import set_up_cuda

_LOOK_S = 0.05


class NcclBackend:
    """A NCCL group with a nonblocking communicator. Buffers: memory of the member's device. Rank 0
    hosts torch's TCPStore (NCCL does not take a store written in Python for granted) and announces
    its address at the meeting."""

    def __init__(
        self, meeting: Rendezvous, member: MeshMember, made: Callable[[NcclBackend], None]
    ) -> None:
        self._group: Any = None
        self.severed = threading.Event()
        made(self)
        set_up_cuda(member.host)
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, int(member.timeout_s))))
        size, timeout = member.size, timedelta(seconds=member.timeout_s)
        address = b""
        if member.rank == 0:
            self._store = host_store(member.host, timeout, size)
            address = json.dumps([member.host, self._store.port]).encode()
        host, port = json.loads(meeting.exchange("tcp", member.rank, address, size)[0])
        if member.rank:
            self._store = dist.TCPStore(
                str(host), int(port), size, is_master=False, timeout=timeout
            )
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = FOREVER
        self._group = dist.ProcessGroupNCCL(self._store, member.rank, size, options)
        if self.severed.is_set():
            raise MeshError(ABANDONED)
        if member.device.type == "cuda":
            torch.cuda.set_device(member.device)
        # This returns before the communicator is connected, and the first operation would wait for
        # that, in C++ and out of reach of sever(). So the first one is here, in the forming thread.
        self._group.eager_connect_single_device(member.device)
        self._connect(member)

    def _connect(self, member: MeshMember) -> None:
        """Returns once every member takes part: then no later operation blocks its caller."""
        handle = self.all_reduce(torch.zeros(1, device=member.device))
        deadline = time.monotonic() + member.timeout_s
        while not handle.poll(_LOOK_S):
            if self.severed.is_set():
                raise MeshError(ABANDONED)
            if time.monotonic() >= deadline:
                raise MeshError("NCCL did not connect the members in time")
        handle.result()

    def all_reduce(self, buffer: Tensor) -> Handle:
        return _NcclWork(self, self._group.allreduce([buffer]), buffer)

    def send(self, buffer: Tensor, peer: int) -> Handle:
        return _NcclWork(self, self._group.send([buffer], peer, 0), buffer)

    def recv(self, buffer: Tensor, peer: int) -> Handle:
        return _NcclWork(self, self._group.recv([buffer], peer, 0), buffer)

    def sever(self) -> None:
        """Aborts the communicator in a thread: the call may wait for the device."""
        if self.severed.is_set():
            return
        self.severed.set()
        if self._group is not None:
            threads.start(self._group.abort, "mesh-abort")


@dataclass(eq=False)
class _NcclWork:
    _backend: NcclBackend
    _work: Any
    _buffer: Tensor

    def poll(self, seconds: float) -> bool:
        # There is nothing to await: completion is an event on the device.
        deadline = time.monotonic() + seconds
        pause_s = 0.0001
        while not self._work.is_completed():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.002)
        return True

    def result(self) -> None:
        if self._backend.severed.is_set():
            raise MeshError("the communicator was aborted")
        self._work.wait()


def agree_on_nccl(meeting: Rendezvous, member: MeshMember) -> bool:
    """True if every member has a CUDA device of its own: only then can NCCL join them."""
    identity, device = "", member.device
    if device.type == "cuda" and dist.is_nccl_available():
        properties = torch.cuda.get_device_properties(device)
        # By uuid alone: two containers on one GPU have different host names.
        identity = str(properties.uuid)
    said = identity.encode()
    everyone: Sequence[bytes] = meeting.exchange("device", member.rank, said, member.size)
    return all(everyone) and len(set(everyone)) == member.size
