"""Worker session: registration, reports to the leader, directives from it.

    report() ──every heartbeat_s, or at once on poke()──► leader
    on_directive ◄── newest (term, seq) only ──────────── leader

- Directives are desired state. A repeated, reordered or outdated directive is ignored, and the
  leader sends a lost one again.
- The leader answers every report, so a hung controller is detected by its silence. After two
  heartbeats the session asks the other controllers for the leader, and after four it leaves.
- A worker that was declared dead (REJOIN) registers as a new incarnation. Its tasks belong to other
  workers by then.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import grpc.aio

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.process import waits
from paceline.process.memory_kills import memory_kills
from paceline.process.structured_log import event
from paceline.redis.client import front_moved
from paceline.rpc.addresses import host_name
from paceline.rpc.client import Backoff, ControlPlane, RequestRefused
from paceline.v1 import common_pb2, worker_pb2

log = logging.getLogger(__name__)

SILENCE_S = 1.5
"""A leader that has not answered for this long, and for four heartbeats, is considered lost."""
DOUBT_S = 0.75
"""After this time, and two heartbeats, the other controllers are asked for the leader. On a busy
machine a leader may be that late: asking is cheap, and the session leaves only if another
controller leads."""


@dataclass(eq=False)
class WorkerSession:
    """One worker's session, on one event loop. Any thread may poke it and read its attributes."""

    control: ControlPlane
    _: KW_ONLY
    worker_id: str
    role: common_pb2.Role
    config: Config
    report: Callable[[], worker_pb2.Report]
    """Called on the event loop; it must not block. The session sets caller and seq."""
    tensor_host: str = "127.0.0.1"
    ranks: int = 1
    scorer: str = ""
    address: str = ""
    """Scorer: its name in the config, and host:port at which it answers rollout workers."""
    seat: str = ""
    """The devices that it holds in turn with another worker. Empty: its devices are its own."""

    def __post_init__(self) -> None:
        self.directive: worker_pb2.Directive | None = None
        """The newest directive of this incarnation. Do not modify it."""
        self.connected = False
        self._incarnation = 0
        self._seq = 0
        self._seen = (-1, -1)
        self._directive_callbacks: list[Callable[[worker_pb2.Directive], None]] = []
        self._rejoin_callbacks: list[Callable[[worker_pb2.RegisterReply], None]] = []
        self._heartbeat_s = self.config.fleet.heartbeat_s
        self._poked = asyncio.Event()
        self._closed = asyncio.Event()
        """Set: one last report is due."""
        self._gone = asyncio.Event()
        """Set: the session no longer waits for the leader."""
        self._over = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def caller(self) -> common_pb2.Caller:
        """Identity of this process; it changes with every registration."""
        return common_pb2.Caller(worker_id=self.worker_id, incarnation=self._incarnation)

    async def call(self, method: str, request: Any) -> Any:
        """Calls the leader, however long there is none. Raises RequestRefused."""
        return await self.control.call(method, request, timeout_s=None)

    def on_directive(self, callback: Callable[[worker_pb2.Directive], None]) -> None:
        """Calls ``callback`` on the event loop with every newer directive; it must not block."""
        self._directive_callbacks.append(callback)

    def on_rejoin(self, callback: Callable[[worker_pb2.RegisterReply], None]) -> None:
        """Calls ``callback`` on the event loop after this process was declared dead and has
        registered as a new incarnation: leases, plans and meshes of the old one are void."""
        self._rejoin_callbacks.append(callback)

    async def register(self, state_version: int = -1) -> worker_pb2.RegisterReply:
        """Registers this process as a new incarnation and returns the leader's reply. By default it
        waits for a leader without limit. Raises RequestRefused if the fleet's config differs (of
        the first registration with BadInput's exit status) or the run has ended."""
        from paceline.config.load import fleet_digest
        from paceline.process.origins import origins_of, release

        digest, canonical = fleet_digest(self.config)
        incarnation = secrets.randbits(63) | 1
        counted = memory_kills()
        role = common_pb2.Role.Name(self.role).removeprefix("ROLE_").lower()
        request = worker_pb2.RegisterRequest(
            caller=common_pb2.Caller(worker_id=self.worker_id, incarnation=incarnation),
            role=self.role,
            host=host_name(),
            pid=os.getpid(),
            config_digest=digest,
            config_json=canonical,
            state_version=state_version,
            ranks=self.ranks,
            tensor_host=self.tensor_host,
            scorer=self.scorer,
            address=self.address,
            cgroup=counted.cgroup if counted is not None else "",
            memory_kills=counted.kills if counted is not None else 0,
            release=release(),
            origins=origins_of(self.config, role, self.scorer),
            seat=self.seat,
        )
        reply: worker_pb2.RegisterReply
        try:
            reply = await self.call("WorkerService.Register", request)
        except RequestRefused as refused:
            if refused.bad_input and not self._incarnation:
                refused.exit_status = BadInput.exit_status
            refused.args = (f"the controller refused {self.worker_id}: {refused}",)
            raise
        self._incarnation = incarnation
        self._seq = 0
        self.directive = None
        if reply.heartbeat_s > 0:
            self._heartbeat_s = reply.heartbeat_s
        event(log, "registered", worker=self.worker_id, incarnation=incarnation)
        return reply

    async def run(self) -> None:
        """Keeps the session until ``close``, across failovers, outages and rejoins. Raises
        RequestRefused only if the leader will never accept this worker (wrong token)."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._keep()
        finally:
            self._over.set()

    async def _keep(self) -> None:
        backoff = Backoff()
        while not self._closed.is_set():
            address = self.control.address
            rejoin = False
            try:
                async for directive in self._connect(address):
                    if not self.connected:
                        self.connected, backoff = True, Backoff()
                        self.control.prefer(address)
                    # A deposed leader may still send.
                    order = (directive.term, directive.seq)
                    if self._closed.is_set() or order <= self._seen:
                        continue
                    self._seen = order
                    front_moved(directive.redis_port)
                    if directive.lifecycle == worker_pb2.LIFECYCLE_REJOIN:
                        rejoin = True
                        break
                    self.directive = directive
                    for callback in self._directive_callbacks:
                        callback(directive)
                # The leader ended the stream: it is stepping down or shutting down.
                if not rejoin:
                    self.control.leave(address)
            except grpc.aio.AioRpcError as error:
                self.control.failed(address, error)
            except TimeoutError:
                event(log, "controller silent", address=address, level=logging.WARNING)
                self.control.leave(address)
            finally:
                self.connected = False
            if self._closed.is_set():
                return
            if rejoin:
                await self._rejoin()
            else:
                await backoff.wait()

    def poke(self) -> None:
        """Sends a report now, because the state has changed. Thread-safe and cheap."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._poked.set)

    async def close(self, *, flush_s: float = 1.0) -> None:
        """Ends ``run`` after a last report with the final lifecycle. Waits at most ``flush_s``
        seconds until the leader has ended the stream: a report that was written but not read may be
        lost with the connection."""
        self._closed.set()
        self._poked.set()
        if self.connected:
            try:
                async with asyncio.timeout(flush_s):
                    await self._over.wait()
            except TimeoutError:
                event(log, "last report not acknowledged", logging.WARNING, worker=self.worker_id)
        self._gone.set()

    async def _connect(self, address: str) -> Any:
        """Yields the directives of one stream from one controller; sends reports meanwhile."""
        call = self.control.bind(address, "WorkerService.Session")(metadata=self.control.metadata)
        sender = asyncio.create_task(self._send_reports(call))
        gone = asyncio.create_task(self._gone.wait())
        try:
            while True:
                read = asyncio.ensure_future(call.read())
                done = await self._heard(address, {read, gone})
                if read not in done:
                    read.cancel()
                    if gone in done:
                        return
                    raise TimeoutError
                directive = read.result()
                if directive is grpc.aio.EOF:
                    return
                yield directive
        finally:
            sender.cancel()
            gone.cancel()
            await asyncio.gather(sender, gone, return_exceptions=True)
            call.cancel()

    async def _heard(
        self, address: str, awaited: set[asyncio.Future[Any]]
    ) -> set[asyncio.Future[Any]]:
        """Returns the finished of ``awaited``; none if ``address`` is silent or no longer leads."""
        doubt_s = max(DOUBT_S, 2 * self._heartbeat_s)
        first = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait(awaited, timeout=doubt_s, return_when=first)
        if done:
            return done
        asking = asyncio.ensure_future(self.control.newer_leader(address, self._seen[0]))
        try:
            left_s = max(SILENCE_S, 4 * self._heartbeat_s) - doubt_s
            done, _ = await asyncio.wait({*awaited, asking}, timeout=left_s, return_when=first)
            if asking in done and done == {asking}:
                self.control.prefer(asking.result())
            return done - {asking}
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _send_reports(self, call: Any) -> None:
        while True:
            self._poked.clear()
            last = self._closed.is_set()
            report = self.report()
            self._seq += 1
            report.caller.worker_id = self.worker_id
            report.caller.incarnation = self._incarnation
            report.seq = self._seq
            report.seen_term = max(0, self._seen[0])
            report.waits.extend(waits.messages(waits.present()))
            try:
                await call.write(report)
                if last:
                    await call.done_writing()
                    return
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The reading side gets the error and handles it.
                return
            with contextlib.suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it swallows a cancellation that coincides with
                # the event, and this loop would never end.
                async with asyncio.timeout(self._heartbeat_s):
                    await self._poked.wait()

    async def _rejoin(self) -> None:
        event(log, "declared dead, rejoining", worker=self.worker_id, level=logging.WARNING)
        self.directive = None
        reply = await self.register(self.report().state_version)
        for callback in self._rejoin_callbacks:
            callback(reply)
