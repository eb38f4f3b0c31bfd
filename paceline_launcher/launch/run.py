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

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config.load import ConfigError, to_toml
from paceline.config.schema import Config
from paceline.errors import BadInput, UserError, in_words, plural
from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.observe.projection import Projection
from paceline.process.files import replace_file
from paceline.providers.ray import give_back_places
from paceline.redis.server import NoRedis, ensure_redis, stop_redis
from paceline.rpc.addresses import port_of
from paceline.rpc.auth import own_token, read_token
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2
from paceline_launcher.launch.child import CONTROLLER, ChildSpecs, controller_ports
from paceline_launcher.launch.ending import close_books, exit_status
from paceline_launcher.launch.exports import export_while_it_runs
from paceline_launcher.launch.fleet import Fleet
from paceline_launcher.launch.job import NodeJob, RunOutcome, write_job, write_outcome
from paceline_launcher.launch.node_workers import NodeWorkers
from paceline_launcher.launch.passing import Passing
from paceline_launcher.launch.run_dir import end_processes
from paceline_launcher.launch.watch import Interrupts, RunWatch
from paceline_launcher.live_view import Console

POLL_S = 0.5
ASK_LIMIT_S = 2.0
REDIS_AGAIN_S = 1.0  # between two attempts to start an embedded Redis that does not start
PATIENCE_S = 10.0  # between SIGTERM and SIGKILL
CONTROLLER_PATIENCE_S = 5.0
LEAVE_S = 10.0
"""Time for the workers of a stopped run to hand their tasks back and to leave by themselves."""


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
        self._earlier_s = Projection.read(self.run_dir).took_s or 0.0
        """Time of the earlier sessions of the run."""
        self._redis_url = ""
        self._fleet: Fleet | None = None

    async def run(self) -> dict[str, Any]:
        """Runs to the end. Returns the summary, whose "status" is finished, failed or interrupted.
        Raises NoRedis or ConfigError if nothing could be started."""
        self._interrupts.install()
        # The running workers of a fleet that is taken over know only the ports of its controllers.
        processes = self.earlier.processes if self.earlier is not None else []
        ports = [port_of(p.address) for p in processes if p.role == CONTROLLER]
        specs = ChildSpecs(
            self.config,
            self.run_dir / "config.toml",
            self.run_dir,
            ports[: self.config.fleet.controllers] or controller_ports(self.config),
            self.master,
        )
        session = self.job.session if self.job is not None else ""
        try:
            summary = await self._start_to_end(specs)
            status, reason = summary["status"], str(summary.get("reason") or "")
            ended = RunOutcome(session, status, exit_status(summary), reason)
            return summary
        except BaseException as error:
            code = error.exit_status if isinstance(error, UserError) else 1
            ended = RunOutcome(session, "failed", code, str(error))
            raise
        finally:
            if session:
                try:
                    write_outcome(self.run_dir, ended)
                except OSError as error:
                    # It takes nothing from how the run has ended.
                    self.console.note(f"error: the outcome is not written: {in_words(error)}")
            if self.config.fleet.provider == "ray" and (
                trouble := await give_back_places(self.config)
            ):
                self.console.note(trouble)

    async def _start_to_end(self, specs: ChildSpecs) -> dict[str, Any]:
        note = self.console.note
        ending = asyncio.Event()
        stopped = self._interrupts.first
        stopped.add_done_callback(lambda _: ending.set())
        passing = Passing(note, ending)

        async def make_token() -> None:
            if read_token(self.config.auth) is None:
                own_token(self.run_dir)  # before a worker looks for it

        await passing.done("the run cannot begin", make_token, self.run_dir)
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
            await passing.done(
                "Redis cannot be started", lambda: self._start_redis(fleet), self.run_dir
            )
            await passing.done(
                "the run cannot begin", lambda: self._write_start(specs), self.run_dir
            )
            if ending.is_set() and self.earlier is None:
                raise KeyboardInterrupt
            if self.earlier is None:
                fleet.start_controllers()
                fleet.start_workers()
            else:
                note(f"took over {plural(fleet.adopt_all(), 'running process')}")
            token = read_token(self.config.auth, self.run_dir) if self.console.private else None
            begun = self.earlier is not None
            watch = RunWatch(self.console, fleet, self._interrupts, self.extends_to, token, begun)
            status, reason = await watch.until_end(self._beside(fleet))
            await self._wind_down(fleet, watch.status, status)
            summary = await self._close_books(status, reason)
        except (NoRedis, ConfigError):
            raise
        except Exception as error:
            # summary.json says how it ended, for later commands.
            self._redis_url = ""
            await self._close_books("failed", f"paceline up failed: {error!r}")
            raise
        finally:
            # Whatever fails here, the rest ends too: no process outlives this one.
            async with contextlib.AsyncExitStack() as stack:
                stack.callback(self.console.close)
                stack.push_async_callback(control.close)
                if self.config.redis.url is None:
                    stack.push_async_callback(self._stop_redis, fleet)
                stack.push_async_callback(fleet.close)
        return summary

    async def _write_start(self, specs: ChildSpecs) -> None:
        """Files that the processes of the run, and other nodes, read."""
        if self.job is not None:
            write_job(self.run_dir, replace(self.job, addresses=tuple(specs.addresses)))
        (self.run_dir / "summary.json").unlink(missing_ok=True)
        replace_file(specs.config_path, to_toml(self.config).encode())

    async def _stop_redis(self, fleet: Fleet) -> None:
        """Ends the embedded server, also if its directory or its disk is gone."""

        def stop() -> None:
            with contextlib.suppress(OSError):
                stop_redis(self.run_dir)
            end_processes(fleet.record.redis)

        await asyncio.shield(asyncio.to_thread(stop))

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
            self.console.note(f"warning: {endpoint.healed}")
        if endpoint.pid is not None:
            identity = ProcessId.of(endpoint.pid)
            if identity not in fleet.record.redis:
                fleet.record.redis.append(identity)
                fleet.write_record()

    async def _beside(self, fleet: Fleet) -> None:
        """Never returns."""
        exports = export_while_it_runs(self.config, self.run_dir, self.console.note)
        await asyncio.gather(self._keep_redis(fleet), exports)

    async def _keep_redis(self, fleet: Fleet) -> None:
        """Restarts the embedded Redis whenever it ends. Never returns."""
        if not fleet.record.redis:
            await asyncio.Event().wait()
        while True:
            await fleet.faults.await_redis(fleet.record.redis[-1])
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
    ) -> None:
        """Stops workers, then controllers."""
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

    async def _close_books(self, status: str, reason: str) -> dict[str, Any]:
        return await close_books(
            self.config,
            self.run_dir,
            self.console.note,
            status=status,
            reason=reason,
            redis_url=self._redis_url,
            wall_s=self._earlier_s + time.monotonic() - self._began,
            give_up=self._interrupts.second,
        )
