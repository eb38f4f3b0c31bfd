"""One run on this machine, from Redis to the summary.

    Redis ──► controllers + workers ──► watch ──► finished ──► export ──► summary
                                         │  ├──► failed ─────────────────►─┤
                                         │  └──► Ctrl-C / SIGTERM ───────►─┤
                                         └ restarts, reconciliation        ▼
                                    stop: workers, controllers, Redis; nothing is left

- However a run ends, every process it started has ended before ``run`` returns.
- An interrupted or failed run can continue: its ledger stays as it is, only its processes stop.
- A second Ctrl-C kills at once; acknowledged work is in the journal already.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.errors import ConfigError
from paceline.config.schema import Config
from paceline.config.toml import to_toml
from paceline.console.live_view import Console
from paceline.process.user_code import python_module
from paceline.redis.server import NoRedis, ensure_redis, stop_redis
from paceline.rpc.client import ControlPlane
from paceline.run_view.fleet_file import FleetRecord, ProcessId
from paceline.run_view.run_records import RunRecords
from paceline.run_view.summary import Accounting, summarise, write_summary
from paceline.run_view.words import text_of
from paceline.supervisor.child import Child, ChildSpec, until_gone
from paceline.supervisor.launch import Launcher
from paceline.supervisor.local import LocalFleet
from paceline.supervisor.status_poller import StatusPoller
from paceline.v1 import admin_pb2

POLL_S = 0.5
REDIS_AGAIN_S = 1.0
"""Between two attempts to start an embedded Redis that does not start."""
PATIENCE_S = 10.0
"""Between SIGTERM and SIGKILL."""
CONTROLLER_PATIENCE_S = 5.0
EXPORT_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status``: finished, failed or interrupted."""

    status: str
    summary: dict[str, Any]

    @property
    def exit_code(self) -> int:
        return {"finished": 0, "failed": 1}.get(self.status, 130)


class LocalRun:
    def __init__(
        self,
        config: Config,
        run_dir: Path,
        console: Console,
        earlier: FleetRecord | None = None,
    ) -> None:
        """``earlier``: record of a fleet that has lost its supervisor and is taken over."""
        self._earlier = earlier
        self._config = config
        self._run_dir = run_dir
        self._console = console
        self._began = time.monotonic()
        self._interrupts = 0
        self._interrupted = asyncio.Event()
        self._at_once = asyncio.Event()
        self._redis_url = ""
        self._dashboard = ""
        self._fleet: LocalFleet | None = None

    async def run(self) -> Outcome:
        """Runs to the end. Raises NoRedis or ConfigError if nothing could be started."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        config_path = self._run_dir / "config.toml"
        config_path.write_text(to_toml(self._config))
        launcher = Launcher(self._config, config_path, self._run_dir, self._known_ports())
        control = ControlPlane.from_config(self._config, launcher.addresses)
        note = self._console.note
        fleet = self._fleet = LocalFleet(
            self._config, launcher, self._run_dir, control, note, self._earlier
        )
        watch = StatusPoller(control, self._run_dir, self._on_event)
        try:
            await self._start_redis(fleet)
            if self._earlier is None:
                fleet.start_all()
            else:
                note(f"took over {fleet.adopt_all()} running processes")
            status, reason = await self._watch(fleet, watch)
            accounting = await self._wind_down(fleet, watch, status)
            export = await self._export() if status == "finished" else None
        except (NoRedis, ConfigError):
            raise
        except Exception as error:
            # summary.json says how it ended, for later commands.
            self._sum_up("failed", f"paceline up failed: {error!r}", None, None)
            raise
        finally:
            await fleet.close()
            await asyncio.shield(asyncio.to_thread(self._stop_redis))
            await control.close()
            self._console.close()
        if status == "finished" and export is None:
            status, reason = (
                "failed",
                f"the final export failed: see {self._run_dir / 'logs' / 'export.log'}",
            )
        return self._sum_up(status, reason, accounting, export)

    def _known_ports(self) -> list[int]:
        """Ports of the controllers that are taken over: the running workers know only these."""
        if self._earlier is None:
            return []
        known = {p.name: p.address for p in self._earlier.processes if p.role == "controller"}
        names = [f"controller-{index}" for index in range(self._config.fleet.controllers)]
        return [int(known[name].rpartition(":")[2]) for name in names if name in known]

    def _on_signal(self) -> None:
        self._interrupts += 1
        self._interrupted.set()
        if self._interrupts == 1:
            self._console.note("stopping; press Ctrl-C again to kill at once")
        elif self._fleet is not None:
            self._at_once.set()
            self._fleet.kill_all()

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["type"] != "StepCommitted":
            self._console.note(text_of(event))

    async def _start_redis(self, fleet: LocalFleet) -> None:
        endpoint = await asyncio.to_thread(ensure_redis, self._run_dir, self._config.redis)
        self._redis_url = fleet.redis_url = endpoint.url
        if endpoint.pid is not None:
            identity = ProcessId.of(endpoint.pid)
            if identity not in fleet.record.redis:
                fleet.record.redis.append(identity)
                fleet.record.write(self._run_dir)

    async def _watch(self, fleet: LocalFleet, watch: StatusPoller) -> tuple[str, str]:
        """Watches the run until it ends. Returns (status, reason)."""
        stop = asyncio.create_task(self._interrupted.wait())
        redis = asyncio.create_task(self._keep_redis(fleet))
        waiting: list[asyncio.Future[Any]] = [stop, fleet.failed, redis]
        try:
            while True:
                if fleet.failed.done():
                    return "failed", fleet.failed.result()
                if stop.done():
                    return "interrupted", "interrupted"
                if await watch.poll() and watch.status is not None:
                    self._note_dashboard(watch.status)
                    self._console.show(watch.status)
                    phase = watch.status.phase
                    if phase == "finished":
                        fleet.finished = True
                        return "finished", watch.status.reason
                    if phase == "failed":
                        return "failed", watch.status.reason
                    await fleet.reconcile(watch.status)
                elif watch.refused:
                    return "failed", watch.refused
                if redis.done():
                    redis.result()
                await asyncio.wait(
                    waiting,
                    timeout=POLL_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            stop.cancel()
            redis.cancel()

    def _note_dashboard(self, status: admin_pb2.StatusReply) -> None:
        urls = [c.rest for c in status.controllers if c.state == "leader" and c.rest]
        if urls and not self._dashboard:
            self._dashboard = urls[0]
            self._console.note(f"dashboard: {self._dashboard}")

    async def _keep_redis(self, fleet: LocalFleet) -> None:
        """Restarts the embedded Redis whenever it ends. Never returns."""
        if not fleet.record.redis:
            await asyncio.Event().wait()
        while True:
            await until_gone(fleet.record.redis[-1])
            self._console.note("the embedded Redis ended; starting it again")
            try:
                await self._start_redis(fleet)
            except NoRedis as error:
                self._console.note(str(error))
                await asyncio.sleep(REDIS_AGAIN_S)

    async def _wind_down(
        self, fleet: LocalFleet, watch: StatusPoller, status: str
    ) -> Accounting | None:
        """Stops workers, then controllers, then counts the samples."""
        if status == "finished" and watch.status is not None:
            # Workers that are still starting have nothing to finish. An interrupt ends only the
            # wait: all steps are committed.
            members = {w.worker_id for w in watch.status.workers if w.state != "dead"}
            waiting = asyncio.create_task(fleet.wait_workers(members, self._config.fleet.finish_s))
            stop = asyncio.create_task(self._interrupted.wait())
            await asyncio.wait({waiting, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
        await fleet.stop_workers(PATIENCE_S)
        await fleet.stop_controllers(CONTROLLER_PATIENCE_S)
        return await asyncio.to_thread(replay, self._redis_url, self._config.run.name)

    async def _export(self) -> Path | None:
        """The newest checkpoint as a Hugging Face directory; None if that fails."""
        checkpoints = RunRecords.read(self._run_dir).history.checkpoints
        if not checkpoints:
            self._console.note("no checkpoint to export")
            return None
        checkpoint = checkpoints[-1].path
        out = self._run_dir / "export"
        self._console.note(f"exporting {checkpoint}")
        trust = ["--trust-remote-code"] if self._config.model.trust_remote_code else []
        # A process of its own, because this one must not import torch.
        command = (*python_module("paceline"), "export", checkpoint, "--out", str(out), *trust)
        log = self._run_dir / "logs" / "export.log"
        child = await Child.start(ChildSpec("export", "export", command, os.environ, log))
        ended = asyncio.create_task(child.wait())
        at_once = asyncio.create_task(self._at_once.wait())
        try:
            await asyncio.wait(
                {ended, at_once}, timeout=EXPORT_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            at_once.cancel()
            if not ended.done():
                child.kill()
        return out if await ended == 0 else None

    def _stop_redis(self) -> None:
        if self._config.redis.url is None:
            stop_redis(self._run_dir)

    def _sum_up(
        self, status: str, reason: str, accounting: Accounting | None, export: Path | None
    ) -> Outcome:
        summary = summarise(
            RunRecords.read(self._run_dir),
            status=status,
            reason=reason,
            wall_s=time.monotonic() - self._began,
            group_size=self._config.rollout.group_size,
            accounting=accounting,
            export=str(export) if export else None,
        )
        write_summary(self._run_dir, summary)
        return Outcome(status, summary)


def replay(redis_url: str, run_id: str) -> Accounting | None:
    """Counts from the run's journal; None if it cannot be read. Blocks."""
    from controller.store.journal_audit import verify

    try:
        report = verify(redis_url, run_id)
    except Exception:  # the summary must not fail with the accounting
        return None
    counts = report.counts
    return Accounting(
        ok=report.ok,
        trained=int(counts.get("trained", 0)),
        lost=int(counts.get("lost", 0)),
        duplicated=int(counts.get("duplicates", 0)),
        dropped=dict(counts.get("dropped", {})),
        failovers=int(counts.get("failovers", 0)),
        mesh_rebuilds=int(counts.get("mesh_rebuilds", 0)),
        rollbacks=int(counts.get("rollbacks", 0)),
        problems=tuple(report.problems),
    )
