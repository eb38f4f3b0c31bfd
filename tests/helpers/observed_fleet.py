"""A real fleet that is watched through its journal while faults are put into it.

Times are those of the journal: Unix seconds at which the leader appended an event.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import redis

from benchmarks import instants
from controller.journal import decode_entry
from controller.keys import Keys
from controller.verify import verify
from paceline.background import BackgroundLoop
from paceline.client import ControlPlane, ControlPlaneUnavailable
from paceline.redis_client import connect_sync
from paceline.supervisor.records import FleetRecord, ProcessId
from paceline.v1 import admin_pb2
from tests.helpers.local_run import Up, write_run

Event = Mapping[str, Any]


def _counts(fleet: Mapping[str, Any]) -> dict[str, int]:
    return {k: int(v) for k, v in fleet.items() if k in ("controllers", "policy", "rollout")}


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

    def close(self) -> None:
        self._client.close()


class ObservedFleet:
    """``paceline up`` of a small model for as long as the block lasts."""

    def __init__(self, where: Path, **sections: dict[str, Any]) -> None:
        train = {
            "steps": 1_000_000,
            "checkpoint_every": 10,
            "eval_every": 1_000_000,
            # Every step passes every instant, also once all there is to learn is learned.
            "skip_zero_advantage": False,
            **sections.pop("train", {}),
        }
        fleet = {"max_restarts": 1000, **sections.pop("fleet", {})}
        self.expected = sum(
            {"controllers": 2, "policy": 2, "rollout": 2, **_counts(fleet)}.values()
        )
        self.config = write_run(where, train=train, fleet=fleet, **sections)
        self.armed = where / "armed"
        self.run_dir = where / "run"
        self.environment = instants.environment(self.armed)
        self.up = Up(self.config, self.run_dir, environment=self.environment)
        self._loop = BackgroundLoop("observer")
        self._control: ControlPlane | None = None
        self._tail: JournalTail | None = None

    # -- looking ------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        home = self.run_dir / "redis"
        password, port = ((home / name).read_text().strip() for name in ("password", "port"))
        return f"redis://:{password}@127.0.0.1:{port}/0"

    @property
    def tail(self) -> JournalTail:
        if self._tail is None:
            self._tail = JournalTail(self.url, "tiny")
        return self._tail

    def record(self) -> FleetRecord:
        record = FleetRecord.read(self.run_dir)
        assert record is not None
        return record

    def process(self, name: str) -> ProcessId:
        """The newest process of that name."""
        return next(p for p in self.record().processes if p.name == name).ids[-1]

    def pids(self) -> dict[str, int]:
        return {p.name: p.ids[-1].pid for p in self.record().processes if p.ids}

    def status(self, timeout_s: float = 20.0) -> admin_pb2.StatusReply:
        if self._control is None:
            addresses = [p.address for p in self.record().processes if p.address]
            self._control = ControlPlane(addresses)
        call = self._control.call(
            "AdminService.GetStatus", admin_pb2.StatusRequest(), timeout_s=timeout_s
        )
        return self._loop.run(call)

    def workers(self) -> dict[str, admin_pb2.WorkerStatus]:
        return {w.worker_id: w for w in self.status().workers if w.state != "dead"}

    # -- waiting ------------------------------------------------------------------------------

    def until(self, true: Callable[[], object], limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not true():
            assert self.up.process.poll() is None, f"the run ended:\n{self.up.said()}"
            assert time.monotonic() < deadline, f"it never became true:\n{self.up.said()}"
            time.sleep(0.05)

    def settled(self, limit_s: float = 90.0) -> None:
        """Every worker is there, all replicas are in the mesh, every engine serves."""
        self.until(self._is_settled, limit_s)
        self.steps(1)

    def _is_settled(self) -> bool:
        record = FleetRecord.read(self.run_dir)
        if record is None or not record.redis or len(record.processes) < self.expected:
            return False
        if not all(p.ids and p.ids[-1].alive() for p in record.processes):
            return False
        try:
            status = self.status(timeout_s=2.0)
        except ControlPlaneUnavailable:
            return False
        living = [w for w in status.workers if w.state == "running"]
        wanted = dict(status.desired)
        return (
            bool(wanted)
            and len({w.worker_id for w in living}) >= sum(wanted.values())
            and {c.pid for c in status.controllers if c.state != "silent"}
            >= {p.ids[-1].pid for p in record.processes if p.role == "controller"}
            and all(w.version >= 0 for w in living)
            and all(
                w.mesh_epoch == status.mesh_epoch for w in living if w.worker_id[:6] == "policy"
            )
        )

    def mark(self) -> int:
        """Where ``first`` may start to look: everything journalled so far is older."""
        while True:
            before = len(self.tail.events)
            self.tail.read()
            if len(self.tail.events) == before:
                return before

    def first(
        self, true: Callable[[Event], bool], since: int, limit_s: float = 60.0
    ) -> tuple[float, Event, int]:
        """(time, event, index) of the first event from index ``since`` on for which it holds."""
        deadline = time.monotonic() + limit_s
        at = since
        while True:
            while at < len(self.tail.events):
                t, event = self.tail.events[at]
                at += 1
                if true(event):
                    return t, event, at
            assert time.monotonic() < deadline, f"it never happened:\n{self.up.said()}"
            assert self.up.process.poll() is None, f"the run ended:\n{self.up.said()}"
            self.tail.read(0.1)

    def steps(self, count: int, limit_s: float = 60.0) -> None:
        """Until so many more steps are committed."""
        at = self.mark()
        for _ in range(count):
            *_, at = self.first(lambda e: e["type"] == "StepCommitted", at, limit_s)

    # -- faults -------------------------------------------------------------------------------

    def send(self, name: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Sends it to the newest process of that name; Unix seconds."""
        identity = self.process(name)
        assert identity.alive(), f"{name} does not run"
        os.kill(identity.pid, number)
        return time.time()

    def fall(
        self,
        name: str,
        instant: str,
        number: signal.Signals = signal.SIGKILL,
        limit_s: float = 30.0,
    ) -> float:
        """The process falls the next time it comes to ``instant``; Unix seconds."""
        return instants.fall(self.armed, self.process(name).pid, instant, number)(limit_s)

    def kill_everything(self) -> None:
        """As a power cut: the supervisor, all that it started, and Redis."""
        self.up.close()

    def start_again(self) -> None:
        """In the same run directory, as after a power cut."""
        if self._control is not None:
            self._loop.run(self._control.close())
            self._control = None
        if self._tail is not None:
            self._tail.close()
            self._tail = None
        self.up = Up(self.config, self.run_dir, environment=self.environment)
        self.settled()

    def redis_process(self) -> ProcessId:
        return self.record().redis[-1]

    # -- the end ------------------------------------------------------------------------------

    def assert_sound(self) -> dict[str, Any]:
        """Replays the journal of the running fleet: nothing lost, nothing trained twice."""
        report = verify(self.url, "tiny")
        assert report.ok, report.problems
        assert report.counts["lost"] == report.counts["duplicates"] == 0
        return report.counts

    def close(self) -> None:
        if self._control is not None:
            self._loop.run(self._control.close())
        self._loop.close()
        if self._tail is not None:
            self._tail.close()
        self.up.close()
