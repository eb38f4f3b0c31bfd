"""Simulated controller process: the controller that ships, on virtual time and in-memory stores.

Requests reach the handlers of its services as gRPC would hand them over; what they raise becomes an
answer as gRPC would send it. Only the edges are replaced: stores, clock, data set, run files, sinks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from controller.context import ControllerContext
from controller.dataset_rows import DatasetRows
from controller.errors import NotLeading
from controller.leader import Leader
from controller.ledger.commands import CommandRefused, RunSpec
from controller.replicated_controller import Controller
from controller.services import worker as worker_service
from controller.services.grpc_server import final_error
from controller.simulator.memory_store import memory_stores
from controller.simulator.virtual_time import Process, ProcessClock
from controller.store.journal import Deposed
from paceline.dataset.rows import RowSource
from paceline.redis.leader_lease import LeaderIdentity
from paceline.v1 import worker_pb2

if TYPE_CHECKING:
    from controller.simulator.worker import SimulatedWorker
    from controller.simulator.world import World

Respond = Callable[[tuple[Any, ...]], None]
SessionKey = tuple[str, int, int]
"""Worker id, incarnation, number of the session."""


class NoRunFiles:
    async def opened(self) -> str | None:
        return None

    async def written(self) -> None: ...
    def record(self, *entry: Any) -> None: ...
    def close(self) -> None: ...


class NoExporters:
    feeds = ()

    def start(self, started_t: float) -> None: ...
    async def replay(self, *span: Any) -> None: ...
    def record(self, *entry: Any) -> None: ...
    def begin_close(self, outcome: str | None) -> None: ...
    def join(self, timeout_s: float) -> bool:
        return True


class SimulatedContext(ControllerContext):
    spec: RunSpec

    def run_spec(self, rows: DatasetRows) -> RunSpec:
        return self.spec

    def open_exports(self) -> Any:
        return NoRunFiles(), NoExporters()


class Prompts(RowSource):
    """A data set of equal rows."""

    digest = ""
    fields = ("prompt",)
    where = "simulated"

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def _read(self, index: int) -> dict[str, Any]:
        return {"prompt": "p"}


class SimulatedController(Controller):
    FOLLOW_MS = 1000

    def __init__(self, world: World, process: Process) -> None:
        name, lease_s = process.name, world.config.controller.leader_lease_s
        identity = LeaderIdentity(name, name, "host", 1, f"{name}/{world.timeline.now}")
        stores = memory_stores(world.redis, process, identity, lease_s=lease_s)
        clock = ProcessClock(process)
        context = SimulatedContext(world.config, Path("run"), identity, stores, clock, tick_s=0.2)
        context.spec = world.facts
        super().__init__(context, self._check_replica)
        self._world = world

    def _check_replica(self, controller: Controller, leader: Leader) -> list[asyncio.Task[None]]:
        """A new leader begins with what its standby has followed."""
        assert self.replica is not None
        self._world.check_replica(self.identity.controller_id, self.replica)
        return []

    async def load_rows(self) -> DatasetRows:
        facts = self._world.facts
        return DatasetRows(Prompts(facts.dataset_rows), Prompts(facts.eval_rows), facts.eval_rows)


class ControllerProcess(Process):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.timeline, name, skew_s=world.rng.uniform(-1.0, 1.0))
        self.world = world
        self.controller = SimulatedController(world, self)
        self._reports: dict[SessionKey, asyncio.Queue[worker_pb2.Report]] = {}
        self._sessions: dict[SessionKey, asyncio.Task[None]] = {}
        self.spawn(self.controller.run())

    # ---- unary requests -------------------------------------------------------------------

    def request(self, handler: Callable[..., Any], request: Any, respond: Respond) -> None:
        self.spawn(self._answer(handler, request, respond))

    async def _answer(self, handler: Callable[..., Any], request: Any, respond: Respond) -> None:
        leader = self.controller.leader
        try:
            reply = await handler(self.controller, request)
        except Exception as error:
            respond(self._status(error))
            return
        self.world.oracle.replied(leader.term if leader is not None else 0, request, reply)
        respond(("ok", reply))

    def _status(self, raised: Exception) -> tuple[Any, ...]:
        error = final_error(self.controller, raised)
        if isinstance(error, CommandRefused):
            return "refused", error.code, str(error)
        if isinstance(error, NotLeading):
            return "elsewhere", error.leader
        if isinstance(error, Deposed | RedisError | OSError):
            return "elsewhere", ""
        raise error

    # ---- sessions -------------------------------------------------------------------------

    def report(self, worker: SimulatedWorker, key: SessionKey, report: worker_pb2.Report) -> None:
        reports = self._reports.get(key)
        if reports is None:
            reports = self._reports[key] = asyncio.Queue()
            self._sessions[key] = self.spawn(self._session(worker, key, reports))
        reports.put_nowait(report)

    def session_lost(self, worker_id: str, incarnation: int) -> None:
        """The worker's connection is found to be broken."""
        for key, task in list(self._sessions.items()):
            if key[:2] == (worker_id, incarnation):
                task.cancel()

    async def _session(
        self,
        worker: SimulatedWorker,
        key: SessionKey,
        queue: asyncio.Queue[worker_pb2.Report],
    ) -> None:
        async def reports() -> AsyncIterator[worker_pb2.Report]:
            while True:
                yield await queue.get()

        send, hint = self.world.network.send, ""
        try:
            async for directive in worker_service.session(self.controller, reports()):
                send(self.name, worker, worker.directed, key, directive)
        except Exception as error:
            status = self._status(error)
            hint = status[1] if status[0] == "elsewhere" else ""
        finally:
            self._sessions.pop(key, None)
            send(self.name, worker, worker.session_over, key, hint)
