"""Gloo backend: the mesh's process group for host memory. (For CUDA memory: nccl_backend.py.)

A backend starts operations and returns a handle for each. Any thread may sever it at any time,
without blocking; every operation of it then ends in an error.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from paceline.mesh import severable_sockets
from paceline.mesh.rendezvous import MeshError, MeshMember, RedisStore, Rendezvous
from paceline.process import threads

# Operations end by completion or by being severed, never by torch's own clock: a healthy peer may
# be silent for as long as its part of a step takes.
FOREVER = timedelta(days=7)

ABANDONED = "the mesh was abandoned"

_forming = threading.Lock()


class Handle(Protocol):
    """One started operation."""

    def poll(self, seconds: float) -> bool:
        """Waits at most ``seconds``; true once the operation has ended, well or badly."""

    def result(self) -> None:
        """After poll() said true: raises the operation's error, if it had one."""


class GlooBackend:
    """A gloo group between the members that meet at ``meeting``. Buffers: host memory. The
    constructor blocks until all members are connected, until its timeout, or until sever() of the
    object in the making (``made`` is called with it before the first wait)."""

    def __init__(
        self, meeting: Rendezvous, member: MeshMember, made: Callable[[GlooBackend], None]
    ) -> None:
        self._sockets: list[severable_sockets.SocketId] = []
        self._addresses: set[severable_sockets.Address] = set()
        self._group: Any = None
        self._severed = threading.Event()
        # Apart: a member that hands on what it receives does both at once.
        self._sends, self._receives = _Pairwise(), _Pairwise()
        made(self)
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        place = {"interface": interface} if interface else {"hostname": member.host}
        with _forming:
            before = severable_sockets.listeners()
            device = dist.ProcessGroupGloo.create_device(**place)
            mine = dict(severable_sockets.listeners().items() - before.items())
        here = json.dumps([*mine.values()]).encode()
        for raw in meeting.exchange("gloo", member.rank, here, member.size):
            self._addresses.update((str(h), int(p)) for h, p in json.loads(raw))
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=member.timeout_s)
        options._devices = [device]
        self._store = RedisStore(meeting, member.size)
        self._group = dist.ProcessGroupGloo(self._store, member.rank, member.size, options)
        severable_sockets.admit_no_more(mine)
        self._sockets = severable_sockets.connected_via(self._addresses)
        if self._severed.is_set():
            severable_sockets.shut(self._sockets)

    def all_reduce(self, buffer: Tensor) -> Handle:
        options = dist.AllreduceOptions()
        options.timeout = FOREVER
        return _GlooWork(self._group.allreduce([buffer], options), buffer)

    def send(self, buffer: Tensor, peer: int) -> Handle:
        return self._sends.start(lambda: self._group.send([buffer], peer, 0))

    def recv(self, buffer: Tensor, peer: int) -> Handle:
        return self._receives.start(lambda: self._group.recv([buffer], peer, 0))

    def lost_peer(self) -> bool:
        """True if a member's process has ended or has abandoned the group. Never blocks."""
        return severable_sockets.any_closed(self._sockets)

    def sever(self) -> None:
        """Ends every operation with an error, here and at the peers. Never blocks."""
        self._severed.set()
        # Without a list yet, the group is still connecting: look for what it has opened so far.
        severable_sockets.shut(self._sockets or severable_sockets.connected_via(self._addresses))
        self._sends.close()
        self._receives.close()


@dataclass(eq=False)
class _GlooWork:
    _work: Any
    _buffer: Tensor  # alive for as long as gloo may write to it

    def poll(self, seconds: float) -> bool:
        if not self._work.is_completed():
            if seconds <= 0:
                # torch takes a timeout of zero for none.
                return False
            try:
                self._work.wait(timedelta(seconds=seconds))
            except RuntimeError:
                # Timed out or failed: only the state tells which.
                return bool(self._work.is_completed())
        return True

    def result(self) -> None:
        self._work.wait(FOREVER)


class _Pairwise:
    """Sends, or receives, one after the other: gloo cannot poll these, and a wait that times out
    closes the connection. So a thread waits without a limit, and sever() frees it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], _PairwiseWork] | None]
        self._jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._started = False

    def start(self, post: Callable[[], Any]) -> Handle:
        work = _PairwiseWork()
        # Behind the lock: a job put after the closing mark would never end.
        with self._lock:
            if self._closed:
                work.finish(ABANDONED)
            else:
                self._jobs.put((post, work))
                if not self._started:
                    self._started = True
                    threads.start(self._run, "mesh-pairwise")
        return work

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            post, work = job
            failure = ABANDONED if self._closed else None
            if failure is None:
                try:
                    post().wait(FOREVER)
                except Exception as error:
                    failure = str(error) or type(error).__name__
            work.finish(failure)
            # The next job may be hours away: do not keep this one's buffer until then.
            del job, post, work
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job[1].finish(ABANDONED)


class _PairwiseWork:
    def __init__(self) -> None:
        self._done = threading.Event()
        # Not the exception: its traceback leads back to this object, and to the whole group.
        self._failure: str | None = None

    def finish(self, failure: str | None) -> None:
        self._failure = failure
        self._done.set()

    def poll(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def result(self) -> None:
        if self._failure is not None:
            raise MeshError(self._failure)
