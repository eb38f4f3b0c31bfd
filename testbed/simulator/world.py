"""Simulated world: one run, put together from a seed and driven to its end."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any, ClassVar

from controller.ledger.enums import Phase
from controller.services import admin
from paceline.config.load import changed_config
from paceline.v1 import admin_pb2
from testbed.simulator.cluster import Cluster, Shape
from testbed.simulator.oracles.ledger import Violation
from testbed.simulator.policy import SimulatedPolicyWorker
from testbed.simulator.rollout import SimulatedRolloutWorker
from testbed.simulator.virtual_time import Process
from testbed.simulator.worker import Client, Fenced, SimulatedScorer, SimulatedWorker

KINDS: dict[str, type[SimulatedWorker]] = {
    "policy": SimulatedPolicyWorker,
    "rollout": SimulatedRolloutWorker,
    "scorer": SimulatedScorer,
}


class World(Cluster):
    workers: dict[str, SimulatedWorker]
    KINDS: ClassVar[dict[str, type[SimulatedWorker]]] = KINDS

    def __init__(self, seed: int, shape: Shape) -> None:
        super().__init__(seed, shape)
        self.workers = {}
        self.extend_to = 0
        """Once it is finished, the run goes on to this step."""
        for n in range(shape.policy):
            self.start_worker(f"policy-{n}")
        for n in range(shape.rollout):
            self.start_worker(f"rollout-{n}")
        for n in range(shape.scorers):
            self.start_worker(f"scorer-rm-{n}")
        self.admin = Client(self, "admin")

    def print_entries(self) -> None:
        """Prints every journal entry from here on."""
        self.trace = lambda now, entry: print(
            *(f"{now:8.3f} {entry.entry.term} {event}" for event in entry.events), sep="\n"
        )

    # ---- processes ------------------------------------------------------------------------

    def start_worker(self, worker_id: str) -> None:
        before = self.workers.get(worker_id)
        if before is not None and before.alive and not before.exited:
            return
        role = worker_id.partition("-")[0]
        self.workers[worker_id] = self.KINDS[role](self, worker_id, self._exited)

    def crash(self, worker: SimulatedWorker) -> None:
        """The process is gone; its peers may or may not see the connection break."""
        if not worker.alive:
            return
        worker.kill()
        rng = self.rng
        for controller in self.controllers.values():
            if rng.random() < 0.8:
                lost = (controller.session_lost, worker.name, worker.incarnation)
                self.timeline.after(rng.random() * 0.2, controller.call_soon, *lost)
        if rng.random() < 0.4 and worker.incarnation:
            exited = admin_pb2.ExitReport(
                worker_id=worker.name, incarnation=worker.incarnation, exit_code=1
            )
            self.ask(admin.report_exit, exited)
        self._restart(worker, rng.uniform(0.3, 3.0))

    def _exited(self, worker: SimulatedWorker, status: int) -> None:
        """A worker's process has ended by itself."""
        if status:
            self.crash(worker)
            return
        worker.kill()
        if not self.oracle.finished:
            self._restart(worker, self.rng.uniform(1.0, 5.0))

    def _restart(self, worker: SimulatedWorker, delay: float) -> None:
        def start() -> None:
            if not self.oracle.finished and worker is self.workers[worker.name]:
                self.start_worker(worker.name)

        self.timeline.after(delay, start)

    def crash_controller(self, name: str, restart_s: float) -> None:
        controller = self.controllers[name]
        if not controller.alive:
            return
        controller.kill()
        self.timeline.after(restart_s, self.start_controller, name)

    def everyone(self) -> list[Process]:
        return [*self.controllers.values(), *self.workers.values(), self.redis.process]

    def ask(self, handler: Callable[..., Any], request: Any) -> None:
        """Somebody gives an order and does not wait for the answer."""

        async def ask() -> None:
            # Refused: the worker or the run is gone already.
            with contextlib.suppress(Fenced, AssertionError):
                await self.admin.call(handler, request)

        self.admin.spawn(ask())

    def extend(self, steps: int) -> None:
        """The finished run's processes end, and are started again with a config of more steps."""
        for controller in self.controllers.values():
            controller.kill()
        for worker in self.workers.values():
            worker.kill()
        self.config = changed_config(self.config, {"train.steps": steps})
        for name in self.controller_names:
            self.start_controller(name)
        for worker_id in list(self.workers):
            self.start_worker(worker_id)

    # ---- the run --------------------------------------------------------------------------

    def run(self, quiet_after: float, limit: float = 400.0) -> None:
        """To the end of the run. Faults have been planned by the caller, all before
        ``quiet_after``.

        Raises Violation where a promise is broken, or where the run does not end.
        """
        errors = _LoggedErrors()
        logger, before = logging.getLogger("controller"), logging.root.manager.disable
        logger.addHandler(errors)
        logging.disable(logging.WARNING)
        try:
            self._run(quiet_after, limit)
        finally:
            logging.disable(before)
            logger.removeHandler(errors)
            self.timeline.close()
        if errors.first:
            raise Violation(errors.first)

    def _run(self, quiet_after: float, limit: float) -> None:
        self.timeline.run(quiet_after, self._over)
        self.network.loss = 0.0
        self.network.duplicate = min(self.network.duplicate, 0.01)
        self.network.torn = 0.0
        self._unpause()
        until, step = quiet_after, -1
        # A slow run goes on as long as it commits steps.
        while not self._over() and step < (step := self.oracle.ledger.state.versions.step):
            until += limit
            self.timeline.run(until, self._over)
        if not self.oracle.finished:
            raise Violation(
                f"the run does not go on: step {step} of {self.shape.spec.steps}, "
                f"no other for {limit:.0f} s without a fault"
            )
        if any(not w.exited and w.alive for w in self.workers.values()):
            names = [w.name for w in self.workers.values() if not w.exited and w.alive]
            raise Violation(f"the run has ended, and {names} do not")
        self.oracle.at_end()

    def _unpause(self) -> None:
        """The person who paused the run sees that it is, whatever order the requests came in."""
        if self.oracle.ledger.state.phase in (Phase.SUSPENDING, Phase.SUSPENDED):
            request_id = f"continue-at-{self.timeline.now}"
            self.ask(admin.continue_, admin_pb2.ContinueRequest(request_id=request_id))
        if self.oracle.ledger.state.paused:
            request_id = f"resume-at-{self.timeline.now}"
            self.ask(admin.pause, admin_pb2.PauseRequest(request_id=request_id, paused=False))
        self.timeline.after(5.0, self._unpause)

    def _over(self) -> bool:
        over = bool(self.oracle.finished) and all(
            w.exited or not w.alive for w in self.workers.values()
        )
        if over and self.extend_to > self.oracle.spec.steps:
            self.extend(self.extend_to)
            self.extend_to = 0
            return False
        return over


class _LoggedErrors(logging.Handler):
    """The controller logs as an error only what is a fault of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.first = self.first or f"{record.getMessage()}: {error!r}"
