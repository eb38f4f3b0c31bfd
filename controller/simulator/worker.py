"""What every simulated worker does: calls that are repeated until answered, a session, a rejoin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.ledger import commands as cmd
from controller.ledger.views import DirectiveView
from controller.simulator.control import LeaseRef, Report, Who
from controller.simulator.loop import TIMEOUT, Future, Process
from paceline.ids import Version

if TYPE_CHECKING:
    from controller.simulator.world import World


class Fenced(Exception):
    """This incarnation is dead for the ledger."""


class Client(Process):
    """Somebody who asks the controllers."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.loop, name)
        self.world = world
        self._leader = world.rng.choice(world.controller_names)

    async def call(self, command: Any, patience: float = 1e9) -> Any:
        """The reply; repeats the same request, at whatever controller, until there is one.

        None after ``patience`` seconds: the request may have had its effect.
        """
        rng = self.world.rng
        last = self.loop.now + patience
        while True:
            if self.loop.now > last:
                return None
            future = Future()
            target = self.world.controllers[self._leader]
            self.world.network.send(self.name, target, self._serve, target, command, future)
            answer = await self.within(future, 1.0)
            if answer is TIMEOUT:
                self._leader = rng.choice(self.world.controller_names)
            elif answer[0] == "ok":
                return answer[1]
            elif answer[0] == "refused":
                if answer[1] in ("fenced", "unknown"):
                    raise Fenced(answer[2])
                raise AssertionError(f"{self.name}: {command} refused: {answer[2]}")
            else:
                hint = answer[1]
                known = self.world.controller_names
                self._leader = hint if hint in known else rng.choice(known)
                await self.sleep(0.05 + rng.random() * 0.2)

    def _serve(self, controller: Any, command: Any, future: Future) -> None:
        def respond(answer: tuple[Any, ...]) -> None:
            self.world.network.send(controller.name, self, future.set, answer)

        controller.request(command, respond)


class SimulatedWorker(Client):
    role: cmd.Role
    HEARTBEAT_S = 0.5

    def __init__(self, world: World, worker_id: str) -> None:
        super().__init__(world, worker_id)
        self.worker_id = worker_id
        self.incarnation = 0
        self.lifecycle = "starting"
        self.progress = 0
        self.busy = False
        self.directive: DirectiveView | None = None
        self.state_version = -1
        self.loaded_version = -1
        self.exited = False
        self._order = (0, 0)
        self._answered = world.loop.now
        self._changed = Future()
        self.wedged = False
        self.spawn(self._main())

    # ---- life -----------------------------------------------------------------------------

    async def _main(self) -> None:
        self.spawn(self._reports())
        while True:
            await self._register()
            try:
                await self.work()
                break
            except Fenced:
                self.rejoin()
        self.lifecycle = "stopped"
        for _ in range(3):
            self._send_report()
            await self.sleep(0.1)
        self.exited = True
        self.world.ended(self)

    async def work(self) -> None:
        """Returns once the worker may exit; raises Fenced where it must register anew."""
        raise NotImplementedError

    def rejoin(self) -> None:
        """Nothing that was agreed with the earlier incarnation counts any more."""

    async def _register(self) -> None:
        while True:
            self.world.incarnations += 1
            self.incarnation = self.world.incarnations
            self.directive = None
            try:
                await self.call(
                    cmd.Register(
                        self.worker_id,
                        self.incarnation,
                        self.role,
                        "host",
                        1,
                        "127.0.0.1",
                        1,
                        Version(self.state_version),
                    )
                )
                return
            except Fenced:
                continue

    @property
    def over(self) -> bool:
        return self.directive is not None and self.directive.lifecycle == "stopped"

    # ---- session --------------------------------------------------------------------------

    async def _reports(self) -> None:
        while True:
            self._send_report()
            await self.sleep(self.HEARTBEAT_S)
            if self.loop.now - self._answered > 1.5:
                self._leader = self.world.rng.choice(self.world.controller_names)

    def _send_report(self) -> None:
        if self.incarnation == 0:
            return
        report = Report(
            Who(self.worker_id, self.incarnation),
            self.lifecycle,
            self.progress,
            self.busy,
            tuple(LeaseRef(*ref) for ref in self.held()),
            self.state_version,
            self.loaded_version,
        )
        controller = self.world.controllers[self._leader]
        self.world.network.send(self.name, controller, controller.report, self, report)

    def held(self) -> list[tuple[str, int]]:
        return []

    def directed(self, incarnation: int, order: tuple[int, int], view: DirectiveView) -> None:
        """A directive came down; one that was overtaken does nothing."""
        if incarnation != self.incarnation or order <= self._order:
            return
        self._order = order
        self._answered = self.loop.now
        self.directive = view
        if view.lifecycle in ("rejoin", "stopped") and self.wedged:
            self.world.crash(self)  # its launcher's part: the main loop cannot hear it
            return
        if view.lifecycle == "draining" and self.lifecycle == "running":
            self.lifecycle = "draining"
        changed, self._changed = self._changed, Future()
        changed.set()

    async def news(self, delay: float = 2.0) -> None:
        """Waits for another directive, at most ``delay`` seconds; Fenced where it says rejoin."""
        await self.within(self._changed, delay)
        self.check()

    def check(self) -> None:
        if self.directive is not None and self.directive.lifecycle == "rejoin":
            raise Fenced("told to rejoin")
