"""Forming and dropping of process groups, both in threads of their own.

Connecting cannot be interrupted, and dropping a group joins its threads: neither may block the
caller.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.mesh.gloo_backend import GlooBackend, Handle
from paceline.mesh.nccl_backend import NcclBackend, agree_on_nccl
from paceline.mesh.rendezvous import (
    EpochCancelled,
    MeshError,
    MeshMember,
    Rendezvous,
    local_address,
)
from paceline.process import threads
from paceline.process.structured_log import first_line

_log = logging.getLogger(__name__)

SLICE_S = 0.02
"""Longest time between two looks at a cancelled flag."""

_LOOK_S = 0.05
# Backends end by themselves at the timeout; this is for one that does not.
_GRACE_S = 5.0


class Forming:
    """Builds the backends in a thread of its own, because connecting cannot be interrupted. If it
    is given up it ends by itself, soon, and hands what it has built to the graveyard."""

    def __init__(self, url: str, key: str, member: MeshMember) -> None:
        self._url, self._key, self._member = url, key, member
        self._deadline = time.monotonic() + member.timeout_s + _GRACE_S
        self._lock = threading.Lock()
        self._given_up = threading.Event()
        self._done = threading.Event()
        self._made: list[GlooBackend | NcclBackend] = []
        self._failure: EpochCancelled | MeshError | None = None
        threads.start(self._run, "mesh-form")

    def result(self, cancelled: Callable[[], bool]) -> tuple[GlooBackend, NcclBackend | None]:
        """Raises EpochCancelled if cancelled first, and MeshError at the timeout."""
        while not self._done.wait(SLICE_S):
            if cancelled() or threads.exiting.is_set():
                self._give_up()
                raise EpochCancelled(self._key)
            if time.monotonic() >= self._deadline:
                self._give_up()
                raise MeshError(f"{self._key}: the members did not connect in time")
        if self._failure is not None:
            raise self._failure
        # Handed over, not shared: the store that a backend keeps refers back to this object, and
        # a cycle would leave the drop to the garbage collector, in any thread at any time.
        made, self._made = self._made, []
        host_side, device_side = made[0], made[1] if len(made) > 1 else None
        assert isinstance(host_side, GlooBackend)
        assert device_side is None or isinstance(device_side, NcclBackend)
        return host_side, device_side

    def _give_up(self) -> None:
        with self._lock:
            self._given_up.set()
            for side in self._made:
                side.sever()
            if self._done.is_set():
                self._bury()

    def _run(self) -> None:
        try:
            self._build()
        except (EpochCancelled, MeshError) as error:
            # A copy without the traceback, which leads to the group and would keep it.
            self._failure = type(error)(str(error))
        except Exception as error:
            _log.debug("forming %s failed", self._key, exc_info=True)
            self._failure = MeshError(first_line(error))
        with self._lock:
            self._done.set()
            if self._given_up.is_set() or self._failure is not None:
                for side in self._made:
                    side.sever()
                self._bury()

    def _bury(self) -> None:
        if self._made:
            graveyard.bury(self._made, [])
            self._made = []

    def _build(self) -> None:
        def is_over() -> bool:
            return self._given_up.is_set() or threads.exiting.is_set()

        member = self._member
        meeting = Rendezvous(self._url, self._key, cancelled=is_over, timeout_s=member.timeout_s)
        try:
            member = replace(member, host=member.host or local_address(self._url))
            meeting.claim(member.rank)
            nccl = agree_on_nccl(meeting, member)
            GlooBackend(meeting, member, self._register)
            if nccl:
                NcclBackend(meeting, member, self._register)
        finally:
            meeting.close()

    def _register(self, side: GlooBackend | NcclBackend) -> None:
        with self._lock:
            if self._given_up.is_set():
                raise EpochCancelled("given up while forming")
            self._made.append(side)


class AbandonedGroups:
    """Severed groups, until they can be dropped. Dropping a group joins its threads while holding
    the interpreter lock: with an operation still running that would stop the whole process, so it
    waits until none is. A group with an operation that never ends is kept for good, with its
    threads, connections and buffers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graves: list[tuple[list[Any], list[Handle]]] = []
        self._thread: threading.Thread | None = None

    def bury(self, sides: list[Any], running: list[Handle]) -> None:
        with self._lock:
            self._graves.append((sides, running))
            if self._thread is None:
                self._thread = threads.start(self._run, "mesh-drop")

    def _run(self) -> None:
        while True:
            threads.exiting.wait(_LOOK_S)
            with self._lock:
                dead = [g for g in self._graves if all(h.poll(0.0) for h in g[1])]
                self._graves = [g for g in self._graves if g not in dead]
            while dead:
                # Here, outside the lock, the last references go.
                dead.pop()
            with self._lock:
                if threads.exiting.is_set():
                    # The interpreter drops everything at its end, and would hang over these.
                    for grave in self._graves:
                        ctypes.pythonapi.Py_IncRef(ctypes.py_object(grave))
                if not self._graves or threads.exiting.is_set():
                    self._thread = None
                    return


graveyard = AbandonedGroups()
