"""One run, led by this node: from Redis to the summary.

    Redis ──► controllers + workers ──► watch ──► finished ──► export ──► summary
                                         │  ├──► failed ─────────────────►─┤
                                         │  └──► Ctrl-C / SIGTERM ───────►─┤
                                         └ restarts, reconciliation        ▼
              stop: open step, checkpoint, workers, controllers, Redis; nothing is left

- However a run ends, every process it started has ended before ``run`` returns.
- An interrupted or failed run can continue: its ledger stays as it is, only its processes stop.
- The first Ctrl-C stops the run for now, with a checkpoint, within ``fleet.stop_s`` seconds. A
  second one kills at once; acknowledged work is in the journal already.
- `paceline up` is one node. Node 0 of a job (`paceline node`) also tells the other nodes, in the
  run's directory, that it has started and how the run has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config.load import ConfigError, to_toml
from paceline.config.schema import Config
from paceline.errors import BadInput, UserError
from paceline.observe.file_tail import FileTail
from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.observe.projection import Projection
from paceline.observe.summary import summarise, write_summary
from paceline.observe.vocabulary import EventType
from paceline.providers.base import Trouble
from paceline.providers.ray import RayProvider
from paceline.redis.server import NoRedis, ensure_redis, redis_log, stop_redis
from paceline.rpc.addresses import port_of
from paceline.rpc.auth import own_token, read_token
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2
from paceline_launcher.launch.child import CONTROLLER, ChildSpecs, controller_ports
from paceline_launcher.launch.ending import after_export, export_newest, replay
from paceline_launcher.launch.fleet import Fleet
from paceline_launcher.launch.job import NodeJob, RunOutcome, write_job, write_outcome
from paceline_launcher.launch.node_workers import NodeWorkers
from paceline_launcher.launch.passing import Passing, in_words
from paceline_launcher.launch.run_dir import EarlierRecord, end_processes, replace_text
from paceline_launcher.launch.watch import Interrupts, RunWatch
from paceline_launcher.live_view import Console

POLL_S = 0.5
ASK_LIMIT_S = 2.0
REDIS_AGAIN_S = 1.0  # between two attempts to start an embedded Redis that does not start
PATIENCE_S = 10.0  # between SIGTERM and SIGKILL
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
class Run:
    config: Config
    run_dir: Path
    console: Console
    workers: NodeWorkers
    earlier: FleetRecord | None = None
    """Record of a fleet that has lost its launcher and is taken over."""
    extends_to: int = 0  # the run was finished, and is given more steps
    master: str = ""  # address of this node for the other nodes of its job; empty for `paceline up`
    job: NodeJob | None = None
    """The job whose node 0 this is, without the addresses of the controllers; None as well."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._interrupts = Interrupts(self._on_first_signal, self._on_second_signal)
        self._before = EarlierRecord.take(self.run_dir)
        self._earlier_s = Projection.read(self.run_dir).history.took_s or 0.0
        """Time of the earlier sessions of the run."""
        self._redis_url = ""
        self._fleet: Fleet | None = None
        self._watch: RunWatch | None = None
        self._events = FileTail(self.run_dir / "events.jsonl")
        list(self._events.records())  # what an earlier session of the run left is no news

    async def run(self) -> Outcome:
        """Runs to the end. Raises NoRedis or ConfigError if nothing could be started."""
        self._interrupts.install()
        specs = ChildSpecs(
            self.config,
            self.run_dir / "config.toml",
            self.run_dir,
            self._adopted_ports() or controller_ports(self.config),
            self.master,
        )
        session = self.job.session if self.job is not None else ""
        try:
            outcome = await self._start_to_end(specs)
            reason = str(outcome.summary.get("reason") or "")
            ended = RunOutcome(session, outcome.status, outcome.exit_code, reason)
            return outcome
        except BaseException as error:
            code = error.exit_status if isinstance(error, UserError) else 1
            ended = RunOutcome(session, "failed", code, str(error))
            raise
        finally:
            if session:
                with self._last_file("nodes/outcome.json"):
                    write_outcome(self.run_dir, ended)
            await self._give_back_places()

    async def _start_to_end(self, specs: ChildSpecs) -> Outcome:
        note = self.console.note
        ending = asyncio.Event()
        stopped = self._interrupts.first
        stopped.add_done_callback(lambda _: ending.set())
        passing = Passing(note, ending)
        await passing.done("the run cannot begin", lambda: self._write_start(specs), self.run_dir)
        if ending.is_set():
            raise KeyboardInterrupt
        control = ControlPlane.from_config(self.config, specs.addresses, self.run_dir)
        fleet = self._fleet = Fleet(
            self.config,
            specs,
            self.run_dir,
            control,
            note,
            self.workers,
            self.master or "127.0.0.1",
            self.earlier,
        )
        try:
            begin = functools.partial(self._start_redis, fleet)
            await passing.done("Redis cannot be started", begin, self.run_dir)
            if ending.is_set() and not self._redis_url:
                raise KeyboardInterrupt
            if self.earlier is None:
                fleet.start_controllers()
                fleet.start_workers()
            else:
                note(f"took over {fleet.adopt_all()} running processes")
            watch = self._watch = RunWatch(
                self.config,
                self.console,
                fleet,
                control,
                self._interrupts,
                self._events,
                self.extends_to,
                token=read_token(self.config.auth, self.run_dir) if self.console.private else None,
                adopted=self.earlier is not None,
            )
            status, reason = await watch.until_end(self._keep_redis(fleet))
            report = await self._wind_down(fleet, watch.status, status)
            export = None
            if status == "finished":
                give_up = self._interrupts.second
                export = await export_newest(self.config, self.run_dir, note, give_up)
        except (NoRedis, ConfigError):
            self._before.restore()
            raise
        except Exception as error:
            # summary.json says how it ended, for later commands.
            self._sum_up("failed", f"paceline up failed: {error!r}", {}, None)
            raise
        finally:
            # Whatever fails here, the rest ends too: no process outlives this one.
            async with contextlib.AsyncExitStack() as stack:
                stack.callback(self.console.close)
                stack.push_async_callback(control.close)
                if self.config.redis.url is None:
                    stack.push_async_callback(self._stop_redis, fleet)
                stack.push_async_callback(fleet.close)
        status, reason = after_export(self.run_dir, status, reason, export)
        return self._sum_up(status, reason, report, export)

    async def _write_start(self, specs: ChildSpecs) -> None:
        """Files that the processes of the run, and other nodes, read."""
        if self.job is not None:
            write_job(self.run_dir, replace(self.job, addresses=tuple(specs.addresses)))
        if read_token(self.config.auth) is None:
            own_token(self.run_dir)  # before a worker looks for it
        (self.run_dir / "summary.json").unlink(missing_ok=True)
        replace_text(specs.config_path, to_toml(self.config))

    async def _stop_redis(self, fleet: Fleet) -> None:
        """Ends the embedded server, also if its directory or its disk is gone."""

        def stop() -> None:
            with contextlib.suppress(OSError):
                stop_redis(self.run_dir)
            end_processes(fleet.record.redis)

        await asyncio.shield(asyncio.to_thread(stop))

    @contextlib.contextmanager
    def _last_file(self, name: str) -> Iterator[None]:
        """A file of the end that cannot be written takes nothing from how the run has ended."""
        try:
            yield
        except OSError as error:
            path = self.run_dir / name
            self.console.note(f"error: {name} is not written: {in_words(error, path)}")

    def _adopted_ports(self) -> list[int]:
        """Ports of the controllers that are taken over: the running workers know only these."""
        if self.earlier is None:
            return []
        ports = {
            process.name: port_of(process.address)
            for process in self.earlier.processes
            if process.role == CONTROLLER
        }
        names = [f"{CONTROLLER}-{index}" for index in range(self.config.fleet.controllers)]
        return [ports[name] for name in names if name in ports]

    async def _give_back_places(self) -> None:
        """Ray keeps the places of workers that have ended, and no leader gives them back any
        more."""
        if self.config.fleet.provider != "ray":
            return

        async def no_drain(worker: admin_pb2.WorkerStatus) -> None:
            """Does nothing: the run has ended."""

        provider = RayProvider(self.config, str(self.run_dir), no_drain)
        try:
            await provider.release()
        except Trouble as trouble:
            self.console.note(f"places on the Ray cluster are not given back: {trouble}")
        finally:
            await provider.close()

    def _on_first_signal(self) -> None:
        self.console.note(
            f"stopping with a checkpoint, within {self.config.fleet.stop_s:g} s (fleet.stop_s); "
            "press Ctrl-C again to kill at once"
        )

    def _on_second_signal(self) -> None:
        if self._fleet is not None:
            self._fleet.kill_all()

    async def _start_redis(self, fleet: Fleet) -> None:
        endpoint = await asyncio.to_thread(ensure_redis, self.run_dir, self.config.redis)
        self._redis_url = fleet.redis_url = endpoint.url
        if endpoint.healed:
            self.console.keep(f"warning: {endpoint.healed}")
        if endpoint.pid is not None:
            identity = ProcessId.of(endpoint.pid)
            if identity not in fleet.record.redis:
                fleet.record.redis.append(identity)
                fleet.write_record()

    async def _keep_redis(self, fleet: Fleet) -> None:
        """Restarts the embedded Redis whenever it ends. Never returns."""
        if not fleet.record.redis:
            await asyncio.Event().wait()
        while True:
            await fleet.faults.await_redis(fleet.record.redis[-1], redis_log(self.run_dir))
            self.console.note("the embedded Redis ended; starting it again")
            said = ""
            while True:
                try:
                    await self._start_redis(fleet)
                    break
                except (BadInput, OSError) as error:
                    words = in_words(error, self.run_dir) if isinstance(error, OSError) else ""
                    words = words or str(error)
                    if words != said:
                        self.console.note(f"paused: Redis cannot be started: {words}")
                    said = words
                    await asyncio.sleep(REDIS_AGAIN_S)

    async def _wind_down(
        self, fleet: Fleet, seen: admin_pb2.StatusReply | None, status: str
    ) -> dict[str, Any]:
        """Stops workers, then controllers, then counts the samples."""
        if seen is not None and seen.phase in ("finished", "suspended"):
            # Workers that are still starting have nothing to finish. An interrupt ends only the
            # wait: all steps are committed.
            finished = status == "finished"
            if not finished:
                fleet.ending.set()
            members = {w.worker_id for w in seen.workers if w.state != "dead"}
            limit_s = self.config.fleet.finish_s if finished else LEAVE_S
            waiting = asyncio.create_task(fleet.wait_workers(members, limit_s))
            interrupt = self._interrupts.first if finished else self._interrupts.second
            ends: list[asyncio.Future[None]] = [waiting, interrupt]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        await fleet.stop_workers(PATIENCE_S)
        await fleet.stop_controllers(CONTROLLER_PATIENCE_S)
        return await asyncio.to_thread(replay, self._redis_url, self.config.run.name)

    def _sum_up(
        self, status: str, reason: str, report: dict[str, Any], export: Path | None
    ) -> Outcome:
        summary = summarise(
            Projection.read(self.run_dir),
            status=status,
            reason=reason,
            wall_s=self._earlier_s + time.monotonic() - self._began,
            group_size=self.config.rollout.group_size,
            export=str(export) if export else None,
            **report,
        )
        # A controller that refuses the config journals nothing: no term has begun with it.
        accepted = self._watch is not None and self._watch.accepted
        accepted |= any(e["type"] == EventType.TERM_BEGUN for _, e in self._events.records())
        if self._before.exists and not (accepted or self.earlier is not None):
            # The earlier record stays as it was.
            with self._last_file("summary.json"):
                self._before.restore()
        else:
            with self._last_file("summary.json"):
                write_summary(self.run_dir, summary)
        return Outcome(status, summary)
