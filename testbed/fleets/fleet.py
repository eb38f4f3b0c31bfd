"""Base of the real fleets under test: journal tail, status, waiting, audit.

Times are those of the journal: Unix seconds at which the leader appended an event.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import redis

from controller.store.journal import decode_entry
from controller.store.journal_audit import verify
from controller.store.redis_keys import Keys
from paceline.observe.vocabulary import EventType
from paceline.process.threads import BackgroundLoop
from paceline.redis.client import connect_sync
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2
from testbed.patience import Patience, until

Event = Mapping[str, Any]
RUN = "tiny"
"""Name that ``write_run`` gives it."""


class JournalTail:
    """Everything journalled since it was made; survives Redis being away."""

    def __init__(self, url: str, run_id: str) -> None:
        self._client = connect_sync(url, timeout_s=2.0)
        self._keys = Keys(run_id)
        self._at = "0-0"
        self.events: list[tuple[float, Event]] = []

    def read(self, block_s: float = 0.02) -> None:
        """Waits at most ``block_s`` for more."""
        try:
            found = self._client.xread(
                {self._keys.journal: self._at}, count=1000, block=max(1, int(block_s * 1e3))
            )
        except redis.RedisError:
            time.sleep(0.02)
            return
        for _, entries in found:
            for position, fields in entries:
                entry = decode_entry(position, fields)
                self._at = position.decode()
                self.events += [(entry.t, event) for event in entry.events]

    def has_snapshot(self) -> bool:
        return bool(self._client.exists(self._keys.snapshot))

    def close(self) -> None:
        self._client.close()


class Fleet:
    """A subclass starts the processes and says where Redis and the controllers are."""

    def __init__(self) -> None:
        self._loop = BackgroundLoop("observer")
        self._control: ControlPlane | None = None
        self._tail: JournalTail | None = None

    @property
    def url(self) -> str:
        """URL of its Redis."""
        raise NotImplementedError

    def control_plane(self) -> ControlPlane:
        raise NotImplementedError

    def check(self) -> None:
        """Fails if the run has ended."""
        raise NotImplementedError

    def said(self) -> str:
        """Output of its processes."""
        raise NotImplementedError

    @property
    def tail(self) -> JournalTail:
        if self._tail is None:
            self._tail = JournalTail(self.url, RUN)
        return self._tail

    def status(self, timeout_s: float = 20.0) -> admin_pb2.StatusReply:
        if self._control is None:
            self._control = self.control_plane()
        call = self._control.call(
            "AdminService.GetStatus", admin_pb2.StatusRequest(), timeout_s=timeout_s
        )
        reply: admin_pb2.StatusReply = self._loop.run(call)
        return reply

    def workers(self) -> dict[str, admin_pb2.WorkerStatus]:
        return {w.worker_id: w for w in self.status().workers if w.state != "dead"}

    def until(self, true: Callable[[], object], limit_s: float = 60.0) -> None:
        until(true, limit_s, every_s=0.05, goes_on=self.check, said=self.said)

    def mark(self) -> int:
        """Position at which ``first`` may start to look: everything journalled so far is older."""
        while True:
            before = len(self.tail.events)
            self.tail.read()
            if len(self.tail.events) == before:
                return before

    def first(
        self, true: Callable[[Event], bool], since: int, limit_s: float = 60.0
    ) -> tuple[float, Event, int]:
        """(time, event, index) of the first event from index ``since`` on for which it holds."""
        patience = Patience(limit_s)
        at = since
        while True:
            while at < len(self.tail.events):
                t, event = self.tail.events[at]
                at += 1
                if true(event):
                    return t, event, at
            assert patience.left(), f"it never happened:\n{self.said()}"
            self.check()
            self.tail.read(0.1)

    def steps(self, count: int, limit_s: float = 60.0) -> None:
        """Until so many more steps are committed."""
        at = self.mark()
        for _ in range(count):
            *_, at = self.first(lambda e: e["type"] == EventType.STEP_COMMITTED, at, limit_s)

    def assert_sound(self) -> dict[str, Any]:
        """Replays the journal of the running fleet: nothing lost, nothing trained twice."""
        report = verify(self.url, RUN)
        assert report.ok, report.problems
        assert report.counts["lost"] == report.counts["duplicates"] == 0
        return report.counts

    def forget(self) -> None:
        """Connections to processes that are gone."""
        if self._control is not None:
            self._loop.run(self._control.close())
            self._control = None
        if self._tail is not None:
            self._tail.close()
            self._tail = None

    def close(self) -> None:
        self.forget()
        self._loop.close()
