"""Simulated world: a fleet, its controllers and its store, put together from a seed and run to the end."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from controller.ledger import commands as cmd
from controller.services import admin
from controller.simulator.controller_process import ControllerProcess
from controller.simulator.members import SimulatedEpoch, Weights
from controller.simulator.memory_store import Landed, MemoryRedis
from controller.simulator.oracle import Oracle, Violation
from controller.simulator.policy import SimulatedPolicyWorker
from controller.simulator.rollout import SimulatedRolloutWorker
from controller.simulator.virtual_time import Network, Process, Timeline
from controller.simulator.worker import Client, Fenced, SimulatedWorker
from controller.store.ledger_follower import LedgerFollower
from paceline.config.load import fleet_digest
from paceline.config.schema import Config
from paceline.v1 import admin_pb2, common_pb2, rollout_pb2, worker_pb2

SNAPSHOT_EVENTS = 60


@dataclass(frozen=True)
class Shape:
    """Size, timing and manners of one simulated run. Times in seconds."""

    facts: cmd.RunSpec
    controllers: int = 2
    policy: int = 2
    rollout: int = 2
    slots: int = 3
    """Tasks a rollout worker holds at once."""
    group_s: Callable[[random.Random], float] = lambda rng: 0.1
    """Time a replica needs for one group's gradients."""
    generate_s: Callable[[random.Random], float] = lambda rng: rng.expovariate(1.0)
    loss: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.01
    torn: float = 0.0
    """Probability that one member's collective fails where the others' succeed."""
    forgetful: float = 0.0
    """Probability that a worker's reports do not name a lease it works at."""
    fates: dict[int, str] = field(default_factory=dict)
    """Training tasks that kill their worker, fail, or can never succeed, by ordinal."""
    lease_ttl_s: float = 3.0
    wedged_after_s: float = 8.0
    fenced: bool = True
    checked: bool = True


class World:
    def __init__(self, seed: int, shape: Shape) -> None:
        self.rng = random.Random(seed)
        self.shape = shape
        self.facts = shape.facts
        self.torn = shape.torn
        self.config = config_of(shape)
        self.config_digest = fleet_digest(self.config)[0]
        self.timeline = Timeline(self.rng)
        self.network = Network(
            self.timeline, loss=shape.loss, duplicate=shape.duplicate, delay=shape.delay
        )
        self.redis = MemoryRedis(Process(self.timeline, "redis"), self.network, fenced=shape.fenced)
        guilty = {f"t{n}" for n, fate in shape.fates.items() if fate in ("kills", "fails")}
        self.oracle = Oracle(shape.facts, guilty=guilty, checked=shape.checked)
        self.redis.landed = self._landed
        self.redis.saved = self._saved
        self.incarnations = 0
        self._epochs: dict[bytes, SimulatedEpoch] = {}
        self.checkpoints: dict[str, Weights] = {"": Weights(0, "initial")}
        self.trace: Callable[[float, Landed], None] | None = None
        self.calm = False
        """No more faults: everything that is down comes back."""
        self.controller_names = [f"controller-{n}" for n in range(shape.controllers)]
        self.controllers: dict[str, ControllerProcess] = {}
        for name in self.controller_names:
            self.controllers[name] = ControllerProcess(self, name)
        self.workers: dict[str, SimulatedWorker] = {}
        self.down: set[str] = set()
        """Workers that a fault keeps from being started again."""
        for n in range(shape.policy):
            self.start_worker(f"policy-{n}")
        for n in range(shape.rollout):
            self.start_worker(f"rollout-{n}")
        self.admin = Client(self, "admin")

    # ---- what the journal says --------------------------------------------------------------

    def _landed(self, entry: Landed) -> None:
        self.oracle.landed(entry)
        if self.trace is not None:
            self.trace(self.timeline.now, entry)

    def _saved(self, number: int, state: str) -> None:
        """A snapshot is the leader's memory at an entry: it must be what the journal says."""
        if number == len(self.redis.entries) and state != self.oracle.ledger.fingerprint():
            raise Violation(f"the snapshot at entry {number} differs from the journal")

    def check_replica(self, name: str, replica: LedgerFollower) -> None:
        """Of a controller that is about to lead."""
        entries = self.redis.entries
        if not entries or replica.at.batch != entries[-1].batch:
            return
        if replica.ledger.fingerprint() != self.oracle.ledger.fingerprint():
            raise Violation(f"{name}: the replayed state differs from the journal's")

    def lose_tail(self, count: int) -> None:
        """The journal fails over to a replica that lags by ``count`` entries."""
        self.redis.lose_tail(count)
        self.oracle.lose_tail(self.redis.entries)

    def epoch(self, mesh: worker_pb2.PolicyMesh) -> SimulatedEpoch:
        """The members of an epoch meet by all that the controller says of it."""
        key = mesh.SerializeToString(deterministic=True)
        if key not in self._epochs:
            self._epochs[key] = SimulatedEpoch(self, mesh)
        return self._epochs[key]

    # ---- processes ------------------------------------------------------------------------

    def start_worker(self, worker_id: str) -> None:
        before = self.workers.get(worker_id)
        if before is not None and before.alive and not before.exited:
            return
        kind = SimulatedPolicyWorker if worker_id.startswith("policy") else SimulatedRolloutWorker
        self.workers[worker_id] = kind(self, worker_id)

    def crash(self, worker: SimulatedWorker, *, restart_s: float | None = None) -> None:
        """The process is gone; its peers may or may not see the connection break."""
        if not worker.alive:
            return
        worker.kill()
        rng = self.rng
        for controller in self.controllers.values():
            if rng.random() < 0.8:
                who = (worker.worker_id, worker.incarnation)
                self.timeline.after(
                    rng.random() * 0.2, controller.call_soon, controller.session_lost, *who
                )
        if rng.random() < 0.4 and worker.incarnation:
            exited = admin_pb2.ExitReport(worker_id=worker.worker_id, exit_code=1)
            exited.incarnation = worker.incarnation
            self.ask(admin.report_exit, exited)
        self._restart(worker, rng.uniform(0.3, 3.0) if restart_s is None else restart_s)

    def ended(self, worker: SimulatedWorker) -> None:
        """It left of its own accord, with status 0."""
        worker.kill()
        if not self.oracle.finished:
            self._restart(worker, self.rng.uniform(1.0, 5.0))

    def _restart(self, worker: SimulatedWorker, delay: float) -> None:
        def start() -> None:
            if self.oracle.finished or worker is not self.workers[worker.worker_id]:
                return
            if worker.worker_id in self.down and not self.calm:
                self.timeline.after(1.0, start)
                return
            self.start_worker(worker.worker_id)

        self.timeline.after(delay, start)

    def crash_controller(self, name: str, restart_s: float) -> None:
        controller = self.controllers[name]
        if not controller.alive:
            return
        controller.kill()
        self.timeline.after(restart_s, self._start_controller, name)

    def _start_controller(self, name: str) -> None:
        self.controllers[name] = ControllerProcess(self, name)

    def is_gone(self, worker_id: str, incarnation: int) -> bool:
        """Whether a peer's connection to this process would be found closed."""
        worker = self.workers[worker_id]
        return worker.incarnation != incarnation or not worker.alive

    def everyone(self) -> list[Process]:
        return [*self.controllers.values(), *self.workers.values(), self.redis.process]

    def ask(self, handler: Callable[..., Any], request: Any) -> None:
        """Somebody gives an order and does not wait for the answer."""
        self.admin.spawn(self._ask(handler, request))

    async def _ask(self, handler: Callable[..., Any], request: Any) -> None:
        try:
            await self.admin.call(handler, request)
        except (Fenced, AssertionError):
            pass  # refused: the worker or the run is gone already

    # ---- what workers draw ----------------------------------------------------------------

    def group_s(self) -> float:
        return self.shape.group_s(self.rng)

    def generate_s(self) -> float:
        return self.shape.generate_s(self.rng)

    def fate(self, lease: rollout_pb2.Lease) -> str:
        if lease.kind != rollout_pb2.TASK_KIND_TRAIN:
            return ""
        return self.shape.fates.get(int(lease.task.task_id[1:]), "")

    def group(self, lease: rollout_pb2.Lease, first: int, last: int) -> rollout_pb2.Group:
        """What a worker makes of ``lease``, sampled with versions ``first`` to ``last``."""
        dull = self.rng.random() < 0.1
        group = rollout_pb2.Group(
            task=lease.task,
            kind=lease.kind,
            prompt_tokens=bytes(4 * 8),
        )
        for number in range(lease.group_size):
            tokens = self.rng.randrange(10, 60)
            head = tokens if first == last else tokens // 2
            spans = [(first, head), (last, tokens - head)]
            group.completions.add(
                tokens=bytes(4 * tokens),
                logprobs=bytes(4 * tokens),
                versions=[common_pb2.VersionSpan(version=v, length=n) for v, n in spans if n],
                finish_reason=rollout_pb2.FINISH_REASON_STOP,
                reward=0.5 if dull else float(number % 2),
            )
        return group

    def send_weights(
        self, sender: SimulatedPolicyWorker, link: worker_pb2.WeightsLink, version: int
    ) -> None:
        receiver = self.workers.get(link.receiver.worker_id)
        if isinstance(receiver, SimulatedRolloutWorker):
            self.network.send(sender.name, receiver, receiver.receive, sender, link.epoch, version)

    # ---- the run --------------------------------------------------------------------------

    def run(self, quiet_after: float, limit: float = 400.0) -> None:
        """To the end of the run. Faults have been planned by the caller, all before ``quiet_after``.

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
        self.calm = True
        self.network.loss = 0.0
        self.network.duplicate = min(self.network.duplicate, 0.01)
        self.torn = 0.0
        self._unpause()
        self.timeline.run(quiet_after + limit, self._over)
        state = self.oracle.ledger.state
        if not self.oracle.finished:
            raise Violation(
                f"the run does not go on: step {state.versions.step} of {self.facts.steps}, "
                f"{limit:.0f} s after the last fault"
            )
        if any(not w.exited and w.alive for w in self.workers.values()):
            names = [w.name for w in self.workers.values() if not w.exited and w.alive]
            raise Violation(f"the run has ended, and {names} do not")
        self.oracle.at_end()

    def _unpause(self) -> None:
        """The person who paused the run sees that it is, whatever order the requests came in."""
        if self.oracle.ledger.state.paused:
            request_id = f"resume-at-{self.timeline.now}"
            self.ask(admin.pause, admin_pb2.PauseRequest(request_id=request_id, paused=False))
        self.timeline.after(5.0, self._unpause)

    def _over(self) -> bool:
        return bool(self.oracle.finished) and all(
            w.exited or not w.alive for w in self.workers.values()
        )


class _LoggedErrors(logging.Handler):
    """The controller logs as an error only what is a fault of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.first = self.first or f"{record.getMessage()}: {error!r}"


def config_of(shape: Shape) -> Config:
    """The controllers' settings; what the run is follows from ``shape.facts``."""
    facts = shape.facts
    config = Config.model_validate(
        {
            "run": {"name": facts.run_name},
            "model": {"path": "/"},
            "data": {"path": "rows"},
            "redis": {"url": "redis://simulated"},
            "rollout": {"group_size": facts.group_size},
            "fleet": {
                "lease_ttl_s": shape.lease_ttl_s,
                "suspect_grace_s": 0.5,
                "wedged_after_s": shape.wedged_after_s,
            },
            "controller": {"leader_lease_s": 1.0},
        }
    )
    # More often than a user may set it: simulated runs are short.
    often = config.controller.model_copy(update={"snapshot_every": SNAPSHOT_EVENTS})
    return config.model_copy(update={"controller": often})
