"""Simulated worker: repeated calls, its session, rejoining, and its end of weights links."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from controller.ledger.decisions.commands import CommandRefused
from controller.runtime import NotLeading
from controller.services import worker as worker_service
from paceline.v1 import common_pb2, worker_pb2
from testbed.simulator.cluster import Cluster
from testbed.simulator.controller_process import Session
from testbed.simulator.gradient_mesh import Weights
from testbed.simulator.virtual_time import TIMEOUT, Process

SEND_S = 0.4
"""Between two looks at what receivers lack."""


class Fenced(Exception):
    """This incarnation is dead for the ledger."""


class Client(Process):
    """Somebody who asks the controllers."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster.timeline, name)
        self.cluster = cluster
        self.rng = cluster.rng
        self._follow("")

    async def call(
        self,
        handler: Callable[..., Any],
        request: Any,
        *,
        wait_s: float = 0.0,
        patience_s: float = 1e9,
    ) -> Any:
        """The reply; repeats the same request, at whatever controller, until there is one.

        ``wait_s``: how long the controller may hold it. None after ``patience_s`` seconds: the
        request may have had its effect.
        """
        cluster = self.cluster
        last = self.time() + patience_s
        while self.time() <= last:
            future = self.create_future()
            target = cluster.controllers[self._leader]
            cluster.network.send(self.name, target, target.request, self, future, handler, request)
            answer = await self.answer(future, wait_s + 1.0)
            if answer is TIMEOUT:
                self._follow("")
            elif isinstance(answer, NotLeading):
                self._follow(answer.leader)
                await asyncio.sleep(0.1 + self.rng.random() * 0.3)
            elif not isinstance(answer, CommandRefused):
                return answer
            elif answer.code in ("fenced", "unknown"):
                raise Fenced(str(answer))
            else:
                raise AssertionError(f"{self.name}: {request} refused: {answer}")
        return None

    def _follow(self, hint: str) -> None:
        known = self.cluster.controller_names
        self._leader = hint if hint in known else self.rng.choice(known)


class SimulatedWorker(Client):
    role: common_pb2.Role
    scorer = ""
    HEARTBEAT_S = 0.8
    SILENCE_S = 2.0
    """A controller that has sent no directive for this long is given up."""
    host = "host"

    def __init__(
        self, cluster: Cluster, name: str, exited: Callable[[SimulatedWorker, int], None]
    ) -> None:
        """``exited`` hears of the process's end by itself, with the exit status."""
        super().__init__(cluster, name)
        self.incarnation = 0
        self.lifecycle = worker_pb2.LIFECYCLE_STARTING
        self.progress = 0
        self.busy = False
        self.directive = worker_pb2.Directive()
        self.state_version = -1
        self.loaded_version = -1
        self.parity_failures = 0
        """Parity failures of this incarnation."""
        self.exited = False
        self.wedged = False
        self.seat = cluster.seat_of(name)
        self.grant = 0
        """Grant of its seat that it follows."""
        self.returned = 0
        """The newest that it has given back."""
        self.parked = True
        self.exit = partial(exited, self)
        self._order = (0, 0)
        self._answered = self.time()
        self._changed = self.create_future()
        self._session = 0
        self._reports = 0
        self.spawn(self._main())

    # ---- life -----------------------------------------------------------------------------

    async def _main(self) -> None:
        self.spawn(self._heartbeat())
        while True:
            await self._register()
            try:
                await self.work()
                break
            except Fenced:
                self.rejoin()
        self.lifecycle = worker_pb2.LIFECYCLE_STOPPED
        for _ in range(3):
            self._send_report()
            await asyncio.sleep(0.1)
        self.exited = True
        self.exit(0)

    async def work(self) -> None:
        """Returns once the worker may exit; raises Fenced if it must register anew."""
        raise NotImplementedError

    def rejoin(self) -> None:
        """Nothing that was agreed with the earlier incarnation counts any more."""

    async def _register(self) -> None:
        while True:
            self.cluster.users_of(self.seat).pop(self.name, None)
            self.parked, self.grant = True, 0
            self.incarnation = self.cluster.new_incarnation(self)
            self.parity_failures = 0
            self.directive = worker_pb2.Directive()
            request = worker_pb2.RegisterRequest(
                caller=self.caller,
                role=self.role,
                host=self.host,
                pid=1,
                tensor_host="127.0.0.1",
                ranks=1,
                state_version=self.state_version,
                config_digest=self.cluster.config_digest,
                seat=self.seat,
                scorer=self.scorer,
                address="127.0.0.1:1" if self.scorer else "",
            )
            with contextlib.suppress(Fenced):
                await self.call(worker_service.register, request)
                return

    @property
    def caller(self) -> common_pb2.Caller:
        return common_pb2.Caller(worker_id=self.name, incarnation=self.incarnation)

    @property
    def over(self) -> bool:
        return self.directive.lifecycle == worker_pb2.LIFECYCLE_STOPPED

    # ---- its seat -------------------------------------------------------------------------

    async def take_seat(self) -> None:
        """Returns once it holds its seat, if it has one, and nobody asks for it; or if it is told
        to end. Between two pieces of its work."""
        while self.seat and not self.over:
            self.check()
            told = self.directive.seat
            if told.hold and told.grant > self.returned:
                if (self.grant, self.parked) != (told.grant, False):
                    await self._occupy(told.grant)
                return
            if not self.parked:
                await self._park()
            elif not told.hold and told.grant not in (0, self.returned):
                # It was asked to give back what it had not taken yet.
                self.grant = self.returned = told.grant
                self._send_report()
            else:
                self.while_parked()
                await self.news(0.5)

    def while_parked(self) -> None:
        """Work that needs no device."""

    async def _occupy(self, grant: int) -> None:
        was_parked, self.grant, self.parked = self.parked, grant, False
        self._send_report()
        if was_parked:
            await self._turn("unpark")
            self.cluster.occupies(self.seat, self.name, self.incarnation, grant)

    async def _park(self) -> None:
        """Says so only once it is off the devices: it never uses them under this grant again."""
        self.busy = False
        await self._turn("park")
        self.cluster.users_of(self.seat).pop(self.name, None)
        self.parked, self.returned = True, self.grant
        self._send_report()

    async def _turn(self, act: str) -> None:
        for moment in ("before", "in", "after"):
            if self.cluster.turning(self, act, moment):
                self.exit(1)
                await self.create_future()
            if moment != "after":
                await asyncio.sleep(self.rng.uniform(0.02, 0.4))

    # ---- session --------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        while True:
            self._send_report()
            await asyncio.sleep(self.HEARTBEAT_S)
            if self.time() - self._answered > self.SILENCE_S:
                self._session += 1
                self._follow("")

    def _send_report(self, said: tuple[int, bool] | None = None) -> None:
        """``said``: a lie about its seat."""
        if self.incarnation == 0:
            return
        self._reports += 1
        report = worker_pb2.Report(
            caller=self.caller,
            seq=self._reports,
            lifecycle=self.lifecycle,
            progress=self.progress,
            busy=self.busy,
            held_leases=[common_pb2.TaskRef(task_id=t, attempt=a) for t, a in self.held()],
            state_version=self.state_version,
            loaded_version=self.loaded_version,
            seen_term=max(0, self._order[0]),
            parity_failures=self.parity_failures,
            parity_detail="a weight differs" if self.parity_failures else "",
        )
        if self.seat:
            report.seat.grant, report.seat.parked = said or (self.grant, self.parked)
        controller = self.cluster.controllers[self._leader]
        session = Session(self, self.incarnation, self._session, self.directed, self.session_over)
        self.cluster.network.send(self.name, controller, controller.report, session, report)

    def says(self, of_its_seat: tuple[int, bool]) -> None:
        """It lies about its seat: a grant, and if it has parked under it."""
        self._send_report(of_its_seat)

    def held(self) -> list[tuple[str, int]]:
        return []

    def directed(self, session: Session, view: worker_pb2.Directive) -> None:
        """A directive came down; one that was overtaken says only that the controller lives."""
        if session.incarnation != self.incarnation:
            return
        self._answered = self.time()
        if (view.term, view.seq) <= self._order:
            return
        self._order = (view.term, view.seq)
        self.directive = view
        away = view.lifecycle in (worker_pb2.LIFECYCLE_REJOIN, worker_pb2.LIFECYCLE_STOPPED)
        if away and self.wedged:
            self.exit(1)  # its launcher's part: the main loop cannot hear it
            return
        draining = view.lifecycle == worker_pb2.LIFECYCLE_DRAINING
        if draining and self.lifecycle == worker_pb2.LIFECYCLE_RUNNING:
            self.lifecycle = worker_pb2.LIFECYCLE_DRAINING
        changed, self._changed = self._changed, self.create_future()
        changed.set_result(None)

    def session_over(self, session: Session, hint: str) -> None:
        if (session.incarnation, session.number) == (self.incarnation, self._session):
            self._session += 1
            self._follow(hint)

    async def news(self, delay: float = 2.0) -> None:
        """Waits for another directive, at most ``delay`` seconds; Fenced if it says rejoin."""
        await self.within(self._changed, delay)
        self.check()

    def check(self) -> None:
        if self.directive.lifecycle == worker_pb2.LIFECYCLE_REJOIN:
            raise Fenced("told to rejoin")


class SimulatedScorer(SimulatedWorker):
    """It has turns, and nothing else that the ledger knows of."""

    role = common_pb2.ROLE_SCORER
    scorer = "rm"

    async def work(self) -> None:
        self.lifecycle = worker_pb2.LIFECYCLE_RUNNING
        leaves = worker_pb2.LIFECYCLE_DRAINING, worker_pb2.LIFECYCLE_STOPPED
        while self.directive.lifecycle not in leaves:
            await self.take_seat()
            await self.news()


class SentWeights:
    """Versions that receivers have acknowledged."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, int], int] = {}
        """Version, by epoch of the link and incarnation of the receiver."""

    def offer(
        self, sender: SimulatedWorker, process: Process, weights: Weights, tree: int | None
    ) -> None:
        """Sends ``weights`` over every link whose receiver has not got them. ``tree``: of the link
        that they came over; None: the sender has computed them."""
        for link in sender.directive.links:
            mine = (link.publisher.worker_id, link.publisher.incarnation)
            if mine != (sender.name, sender.incarnation) or (tree is not None and tree < link.tree):
                continue
            key = (link.epoch, link.receiver.incarnation)
            receiver = sender.cluster.workers.get(link.receiver.worker_id)
            receive = getattr(receiver, "receive", None)
            if receiver is not None and receive and self._newest.get(key, -1) < weights.version:
                arrived = (link.epoch, weights, process, self.acknowledged)
                sender.cluster.network.send(sender.name, receiver, receive, *arrived)

    def acknowledged(self, link: tuple[int, int], version: int) -> None:
        """``link``: epoch and incarnation of the receiver."""
        self._newest[link] = max(version, self._newest.get(link, -1))

    def forget_after(self, version: int) -> None:
        """The versions after it were not committed: others take their numbers."""
        self._newest = {link: sent for link, sent in self._newest.items() if sent <= version}
