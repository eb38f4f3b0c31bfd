"""Simulated controller process: the controller that ships, on virtual time and in-memory stores.

Requests reach the handlers of its services as gRPC would hand them over; what they raise becomes an
answer as gRPC would send it. Only the edges are replaced: stores, clock, data set, run files,
sinks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from controller.context import ControllerContext
from controller.dataset_rows import DatasetRows
from controller.leader import Leader
from controller.ledger.decisions.commands import CommandRefused
from controller.ledger.specs import LiveSpec, RunSpec, values
from controller.replicated_controller import Controller
from controller.runtime import NotLeading
from controller.services import worker as worker_service
from controller.services.grpc_server import final_error
from controller.store.journal import Deposed
from paceline.config.schema import Config
from paceline.dataset.rows import RowSource
from paceline.observe.projection import Projector
from paceline.redis.leader_lease import LeaderIdentity
from paceline.v1 import worker_pb2
from testbed.simulator.memory_store import MemoryRedis, memory_stores
from testbed.simulator.oracles.ledger import Oracle
from testbed.simulator.virtual_time import Process, ProcessClock, settle


@dataclass(frozen=True, slots=True)
class Session:
    """A worker's end of one of its sessions."""

    worker: Process
    incarnation: int
    number: int
    directed: Callable[[Session, worker_pb2.Directive], None]
    over: Callable[[Session, str], None]
    """With the name of the leader, or an empty one."""


class NoRunFiles:
    def start(self) -> None: ...
    async def opened(self) -> str | None:
        return None

    async def written(self) -> None: ...
    def record(self, *entry: Any) -> None: ...
    def close(self) -> None: ...


class NoExporters:
    feeds = ()
    archive = None

    def start(self, *span: Any) -> None: ...
    def record(self, *entry: Any) -> None: ...
    def begin_close(self, outcome: str | None) -> None: ...
    def join(self, timeout_s: float) -> bool:
        return True


class SimulatedContext(ControllerContext):
    spec: RunSpec

    def __post_init__(self) -> None:
        super().__post_init__()
        self.projector = Projector(self.run_dir, inline=True)

    def run_spec(self, rows: DatasetRows, config: Config) -> RunSpec:
        now = super().run_spec(rows, config)
        return replace(self.spec, **values(LiveSpec, now))

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

    def __init__(
        self, process: Process, config: Config, redis: MemoryRedis, oracle: Oracle
    ) -> None:
        name, lease_s = process.name, config.controller.leader_lease_s
        clock = ProcessClock(process)
        identity = LeaderIdentity(name, name, "host", 1, f"{name}/{process.time()}")
        stores = memory_stores(redis, process, identity, lease_s=lease_s)
        context = SimulatedContext(config, Path("run"), identity, stores, clock, tick_s=0.2)
        context.spec = oracle.spec
        super().__init__(context, self._check_replica)
        self._oracle = oracle

    def _check_replica(self, controller: Controller, leader: Leader) -> None:
        """A new leader begins with what its standby has followed."""
        assert self.replica is not None
        self._oracle.check_replica(self.identity.controller_id, self.replica)

    async def load_rows(self) -> DatasetRows:
        spec = self._oracle.spec
        sets = {each.name: Prompts(each.rows) for each in spec.eval_sets}
        return DatasetRows(Prompts(spec.dataset_rows), Prompts(spec.eval_rows), sets)


class ControllerProcess(Process):
    def __init__(self, name: str, config: Config, redis: MemoryRedis, oracle: Oracle) -> None:
        timeline = redis.process.timeline
        super().__init__(timeline, name, skew_s=timeline.rng.uniform(-1.0, 1.0))
        self.controller = SimulatedController(self, config, redis, oracle)
        self._network = redis.network
        self._oracle = oracle
        self._sessions: dict[Session, tuple[asyncio.Queue[worker_pb2.Report], asyncio.Task[None]]]
        self._sessions = {}
        """All sessions, also those that are over: what still comes in over one of them is lost."""
        self.spawn(self.controller.run())

    # ---- unary requests -------------------------------------------------------------------

    def request(
        self,
        client: Process,
        future: asyncio.Future[Any],
        handler: Callable[..., Any],
        request: Any,
    ) -> None:
        """Gives the client's ``future`` the reply, or the error that the client will see."""
        self.spawn(self._answer(client, future, handler, request))

    async def _answer(
        self,
        client: Process,
        future: asyncio.Future[Any],
        handler: Callable[..., Any],
        request: Any,
    ) -> None:
        leader = self.controller.leader
        try:
            answer = await handler(self.controller, request)
        except Exception as error:
            answer = self._seen_by_client(error)
        else:
            if client.name != "liar":  # whom nobody owes the same answer twice
                term = leader.term if leader is not None else 0
                self._oracle.replied(term, request, answer)
        self._network.send(self.name, client, settle, future, answer)

    def _seen_by_client(self, raised: Exception) -> CommandRefused | NotLeading:
        error = final_error(self.controller, raised)
        if isinstance(error, CommandRefused | NotLeading):
            return error
        if isinstance(error, Deposed | RedisError | OSError):
            return NotLeading("")
        raise error

    # ---- sessions -------------------------------------------------------------------------

    def report(self, session: Session, report: worker_pb2.Report) -> None:
        if session not in self._sessions:
            queue: asyncio.Queue[worker_pb2.Report] = asyncio.Queue()
            self._sessions[session] = queue, self.spawn(self._serve(session, queue))
        self._sessions[session][0].put_nowait(report)

    def session_lost(self, worker_id: str, incarnation: int) -> None:
        """The worker's connection is found to be broken."""
        for session, (_, task) in list(self._sessions.items()):
            if (session.worker.name, session.incarnation) == (worker_id, incarnation):
                task.cancel()

    async def _serve(self, session: Session, queue: asyncio.Queue[worker_pb2.Report]) -> None:
        async def reports() -> AsyncIterator[worker_pb2.Report]:
            while True:
                yield await queue.get()

        send, hint = self._network.send, ""
        try:
            async for directive in worker_service.session(self.controller, reports()):
                send(self.name, session.worker, session.directed, session, directive)
        except Exception as error:
            seen = self._seen_by_client(error)
            hint = seen.leader if isinstance(seen, NotLeading) else ""
        finally:
            send(self.name, session.worker, session.over, session, hint)
