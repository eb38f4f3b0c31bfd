"""One run on this machine, from Redis to the summary.

    Redis ──► controllers + workers ──► watch ──► finished ──► export ──► summary
                                         │  ├──► failed ─────────────────►─┤
                                         │  └──► Ctrl-C / SIGTERM ───────►─┤
                                         └ restarts, reconciliation        ▼
              stop: open step, checkpoint, workers, controllers, Redis; nothing is left

- However a run ends, every process it started has ended before ``run`` returns.
- An interrupted or failed run can continue: its ledger stays as it is, only its processes stop.
- The first Ctrl-C stops the run for now, with a checkpoint, within ``fleet.stop_s`` seconds. A
  second one kills at once; acknowledged work is in the journal already.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.load import ConfigError, to_toml
from paceline.config.schema import Config
from paceline.observe.event_follower import leader_status
from paceline.observe.event_history import text_of
from paceline.observe.file_tail import FileTail
from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.observe.run_end import run_end
from paceline.observe.run_records import RunRecords
from paceline.observe.summary import summarise, write_summary
from paceline.observe.vocabulary import EventType
from paceline.redis.server import NoRedis, ensure_redis, redis_log, stop_redis
from paceline.rpc.auth import dashboard_link, own_token, read_token
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2
from paceline_launcher.console.live_view import Console
from paceline_launcher.launch.earlier_record import EarlierRecord
from paceline_launcher.launch.final_export import export_log, export_newest
from paceline_launcher.launch.launch import Launcher, controller_ports
from paceline_launcher.launch.local import LocalFleet
from paceline_launcher.launch.timed_stop import TimedStop
from paceline_launcher.machine_gpus import machine_gpus

if TYPE_CHECKING:
    from controller.store.journal_audit import Report

POLL_S = 0.5
ASK_LIMIT_S = 2.0
REDIS_AGAIN_S = 1.0
"""Between two attempts to start an embedded Redis that does not start."""
PATIENCE_S = 10.0
"""Between SIGTERM and SIGKILL."""
CONTROLLER_PATIENCE_S = 5.0
LEAVE_S = 10.0
"""Time for the workers of a stopped run to hand their tasks back and to leave by themselves."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status``: finished, failed or interrupted."""

    status: str
    summary: dict[str, Any]

    @property
    def exit_code(self) -> int:
        return {"finished": 0, "failed": 1}.get(self.status, 130)


@dataclass(eq=False)
class LocalRun:
    config: Config
    run_dir: Path
    console: Console
    earlier: FleetRecord | None = None
    """Record of a fleet that has lost its supervisor and is taken over."""
    extends_to: int = 0
    """The run was finished, and is given more steps."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        loop = asyncio.get_running_loop()
        self._interrupted: asyncio.Future[None] = loop.create_future()
        """Done at the first signal."""
        self._at_once: asyncio.Future[None] = loop.create_future()
        """Done at the second."""
        self._before = EarlierRecord.take(self.run_dir)
        self._earlier_s = run_end(self.run_dir).took_s
        """Time of the earlier sessions of the run."""
        self._redis_url = ""
        self._dashboard = ""
        self._fleet: LocalFleet | None = None
        self._status: admin_pb2.StatusReply | None = None
        self._begun = self.earlier is not None
        """A leader has had a term. A controller that reads the journal again tells of none."""
        self._accepted = self.earlier is not None
        """A leader has begun its term with this config; a controller that refuses the config
        journals nothing."""
        self._stop: TimedStop | None = None
        """Set while the run is being stopped."""
        self._events = FileTail(self.run_dir / "events.jsonl")
        list(self._events.records())  # what an earlier session of the run left is no news

    async def run(self) -> Outcome:
        """Runs to the end. Raises NoRedis or ConfigError if nothing could be started."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        if read_token(self.config.auth) is None:
            own_token(self.run_dir)  # before a worker looks for it
        (self.run_dir / "summary.json").unlink(missing_ok=True)
        config_path = self.run_dir / "config.toml"
        config_path.write_text(to_toml(self.config))
        ports = self._known_ports() or controller_ports(self.config)
        launcher = self._launcher(config_path, ports)
        control = ControlPlane.from_config(self.config, launcher.addresses, self.run_dir)
        note = self.console.note
        fleet = self._fleet = self._new_fleet(launcher, control)
        try:
            await self._start_redis(fleet)
            if self.earlier is None:
                fleet.start_all()
            else:
                note(f"took over {fleet.adopt_all()} running processes")
            status, reason = await self._watch(fleet, control)
            report = await self._wind_down(fleet, status)
            export = None
            if status == "finished":
                export = await export_newest(self.config, self.run_dir, note, self._at_once)
        except (NoRedis, ConfigError):
            self._before.restore()
            raise
        except Exception as error:
            # summary.json says how it ended, for later commands.
            self._sum_up("failed", f"paceline up failed: {error!r}", None, None)
            raise
        finally:
            await fleet.close()
            if self.config.redis.url is None:
                await asyncio.shield(asyncio.to_thread(stop_redis, self.run_dir))
            await control.close()
            self.console.close()
        if status == "finished" and export is None:
            status, reason = (
                "failed",
                f"the final export failed: see {export_log(self.run_dir)}",
            )
        return self._sum_up(status, reason, report, export)

    def _launcher(self, config_path: Path, ports: Sequence[int]) -> Launcher:
        return Launcher(self.config, config_path, self.run_dir, ports)

    def _new_fleet(self, launcher: Launcher, control: ControlPlane) -> LocalFleet:
        note = self.console.note
        gpus = machine_gpus(self.config, os.environ)
        return LocalFleet(self.config, launcher, self.run_dir, control, note, self.earlier, gpus)

    def _known_ports(self) -> list[int]:
        """Ports of the controllers that are taken over: the running workers know only these."""
        if self.earlier is None:
            return []
        known = {p.name: p.address for p in self.earlier.processes if p.role == "controller"}
        names = [f"controller-{index}" for index in range(self.config.fleet.controllers)]
        return [int(known[name].rpartition(":")[2]) for name in names if name in known]

    def _on_signal(self) -> None:
        if not self._interrupted.done():
            self._interrupted.set_result(None)
            self.console.note(
                f"stopping with a checkpoint, within {self.config.fleet.stop_s:g} s (fleet.stop_s); "
                "press Ctrl-C again to kill at once"
            )
        elif self._fleet is not None:
            self._fleet.kill_all()
            if not self._at_once.done():
                self._at_once.set_result(None)

    async def _note_events(self) -> None:
        """Prints the new lines of events.jsonl. The live view shows steps itself."""
        for _, event in await asyncio.to_thread(lambda: list(self._events.records())):
            self._accepted |= event["type"] == EventType.TERM_BEGUN
            if event["type"] != EventType.STEP_COMMITTED:
                self.console.note(text_of(event))

    async def _start_redis(self, fleet: LocalFleet) -> None:
        endpoint = await asyncio.to_thread(ensure_redis, self.run_dir, self.config.redis)
        self._redis_url = fleet.redis_url = endpoint.url
        if endpoint.pid is not None:
            identity = ProcessId.of(endpoint.pid)
            if identity not in fleet.record.redis:
                fleet.record.redis.append(identity)
                fleet.record.write(self.run_dir)

    async def _watch(self, fleet: LocalFleet, control: ControlPlane) -> tuple[str, str]:
        """Watches the run until it ends. Returns (status, reason)."""
        redis = asyncio.create_task(self._keep_redis(fleet))
        try:
            while True:
                if fleet.failed.done():
                    return "failed", fleet.failed.result()
                await self._note_events()
                try:
                    if end := await self._poll(fleet, control):
                        return end
                except ControlPlaneUnavailable:
                    # An election, or they are still starting. A stop is timed all the same.
                    if self._interrupted.done() and self._status is not None:
                        ending = self._status.phase == "stopping"
                        limit_s, why = self.config.fleet.stop_s, "paceline up was interrupted"
                        self._stop = self._stop or TimedStop(control, limit_s, why, ending=ending)
                except RequestRefused as error:
                    return "failed", error.message
                if self._must_stop_now():
                    return "interrupted", "interrupted"
                if redis.done():
                    redis.result()
                again = self._at_once if self._interrupted.done() else self._interrupted
                waiting: list[asyncio.Future[Any]] = [again, fleet.failed, redis]
                await asyncio.wait(waiting, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            redis.cancel()

    async def _poll(self, fleet: LocalFleet, control: ControlPlane) -> tuple[str, str] | None:
        """One look at the run, and what follows from it. (status, reason) once it has ended."""
        if self._stop is not None:
            await self._stop.ask()
        status = self._status = await leader_status(control, ASK_LIMIT_S)
        self._begun |= status.term > 0
        self._note_dashboard(status)
        self.console.show(status)
        if status.total_steps < self.extends_to:
            return None  # the journal's end; the leader has not extended the run yet
        if status.phase in ("finished", "failed"):
            fleet.finished = status.phase == "finished"
            return status.phase, status.reason
        if self._interrupted.done() and status.phase == "suspended":
            return "interrupted", f"stopped after step {status.step}"
        await fleet.reconcile(status)
        if self._stop is None and (self._interrupted.done() or status.phase == "stopping"):
            limit_s, ending = self.config.fleet.stop_s, status.phase == "stopping"
            self._stop = TimedStop(control, limit_s, "paceline up was interrupted", ending=ending)
            await self._stop.ask()
        elif not self._interrupted.done() and status.phase in ("suspending", "suspended"):
            request = admin_pb2.ContinueRequest(request_id=uuid.uuid4().hex)
            await control.call("AdminService.Continue", request, timeout_s=ASK_LIMIT_S)
        return None

    def _must_stop_now(self) -> bool:
        """A stop that waits for nothing more: nothing has begun, the user insists, or time is up."""
        if not self._interrupted.done():
            return False
        return (
            self._status is None
            # Nothing to save, and no leader to record a stop: the data set of a new run is being
            # opened.
            or not self._begun
            or self._at_once.done()
            or (self._stop is not None and self._stop.overdue)
        )

    def _note_dashboard(self, status: admin_pb2.StatusReply) -> None:
        urls = [c.rest for c in status.controllers if c.state == "leader" and c.rest]
        if urls and not self._dashboard:
            self._dashboard = urls[0]
            token = read_token(self.config.auth, self.run_dir) if self.console.private else None
            self.console.keep(f"dashboard: {dashboard_link(self._dashboard, token)}")

    async def _keep_redis(self, fleet: LocalFleet) -> None:
        """Restarts the embedded Redis whenever it ends. Never returns."""
        if not fleet.record.redis:
            await asyncio.Event().wait()
        while True:
            await fleet.faults.await_redis(fleet.record.redis[-1], redis_log(self.run_dir))
            self.console.note("the embedded Redis ended; starting it again")
            try:
                await self._start_redis(fleet)
            except NoRedis as error:
                self.console.note(str(error))
                await asyncio.sleep(REDIS_AGAIN_S)

    async def _wind_down(self, fleet: LocalFleet, status: str) -> Report | None:
        """Stops workers, then controllers, then counts the samples."""
        if self._status is not None and self._status.phase in ("finished", "suspended"):
            # Workers that are still starting have nothing to finish. An interrupt ends only the
            # wait: all steps are committed.
            finished = status == "finished"
            if not finished:
                fleet.begin_end()
            members = {w.worker_id for w in self._status.workers if w.state != "dead"}
            limit_s = self.config.fleet.finish_s if finished else LEAVE_S
            waiting = asyncio.create_task(fleet.wait_workers(members, limit_s))
            interrupt = self._interrupted if finished else self._at_once
            ends: list[asyncio.Future[None]] = [waiting, interrupt]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await fleet.stop_workers(PATIENCE_S)
        await fleet.stop_controllers(CONTROLLER_PATIENCE_S)
        return await asyncio.to_thread(replay, self._redis_url, self.config.run.name)

    def _sum_up(
        self, status: str, reason: str, report: Report | None, export: Path | None
    ) -> Outcome:
        earlier_s = self._earlier_s or 0.0
        summary = summarise(
            RunRecords.read(self.run_dir),
            status=status,
            reason=reason,
            wall_s=earlier_s + time.monotonic() - self._began,
            group_size=self.config.rollout.group_size,
            counts=report.counts if report else None,
            problems=report.problems if report else (),
            faults=report.faults if report else None,
            export=str(export) if export else None,
        )
        self._accepted |= any(e["type"] == EventType.TERM_BEGUN for _, e in self._events.records())
        if self._before.exists and not self._accepted:
            # The earlier record stays as it was.
            self._before.restore()
        else:
            write_summary(self.run_dir, summary)
        return Outcome(status, summary)


def replay(redis_url: str, run_id: str) -> Report | None:
    """The run's replayed journal; None if it cannot be read. Blocks."""
    from controller.store.journal_audit import verify

    try:
        return verify(redis_url, run_id)
    except Exception:  # the summary must not fail with the accounting
        return None
