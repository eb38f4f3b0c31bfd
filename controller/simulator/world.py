"""A fleet, its controllers and its store, put together from a seed and run to the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from controller.ledger import commands as cmd
from controller.ledger.enums import DeathCause
from controller.ledger.views import LinkView
from controller.simulator.control import Controller
from controller.simulator.loop import Loop, Network, Process
from controller.simulator.members import SimulatedEpoch, Weights
from controller.simulator.oracle import Oracle, Violation
from controller.simulator.policy import PolicyWorker
from controller.simulator.rollout import RolloutWorker
from controller.simulator.store import Entry, Store
from controller.simulator.worker import Client, Fenced, SimulatedWorker
from paceline.ids import Version


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
        self.slots = shape.slots
        self.torn = shape.torn
        self.loop = Loop(self.rng)
        self.network = Network(
            self.loop, loss=shape.loss, duplicate=shape.duplicate, delay=shape.delay
        )
        self.store = Store(self.loop, self.network, fenced=shape.fenced)
        guilty = {f"t{n}" for n, fate in shape.fates.items() if fate in ("kills", "fails")}
        self.oracle = Oracle(shape.facts, guilty=guilty, checked=shape.checked)
        self.store.landed = self._landed
        self.limits = SimpleNamespace(
            lease_ttl_s=shape.lease_ttl_s,
            suspect_grace_s=0.5,
            wedged_after_s=shape.wedged_after_s,
        )
        self.incarnations = 0
        self.epochs: dict[int, SimulatedEpoch] = {}
        self.checkpoints: dict[str, Weights] = {"": Weights(0, "initial")}
        self.trace: Callable[[float, Entry], None] | None = None
        self.calm = False
        """No more faults: everything that is down comes back."""
        self.controller_names = [f"controller-{n}" for n in range(shape.controllers)]
        self.controllers: dict[str, Controller] = {}
        for name in self.controller_names:
            self.controllers[name] = Controller(self, name)
        self.workers: dict[str, SimulatedWorker] = {}
        self.down: set[str] = set()
        """Workers that a fault keeps from being started again."""
        for n in range(shape.policy):
            self.start_worker(f"policy-{n}")
        for n in range(shape.rollout):
            self.start_worker(f"rollout-{n}")
        self.admin = Client(self, "admin")

    def _landed(self, entry: Entry) -> None:
        self.oracle.landed(entry)
        if self.trace is not None:
            self.trace(self.loop.now, entry)

    # ---- processes ------------------------------------------------------------------------

    def start_worker(self, worker_id: str) -> None:
        before = self.workers.get(worker_id)
        if before is not None and before.alive and not before.exited:
            return
        kind = PolicyWorker if worker_id.startswith("policy") else RolloutWorker
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
                self.loop.after(rng.random() * 0.2, controller.post, controller.session_lost, *who)
        if rng.random() < 0.4 and worker.incarnation:
            self.ask(cmd.DeclareDead(worker.worker_id, worker.incarnation, DeathCause.EXIT))
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
                self.loop.after(1.0, start)
                return
            self.start_worker(worker.worker_id)

        self.loop.after(delay, start)

    def crash_controller(self, name: str, restart_s: float) -> None:
        controller = self.controllers[name]
        if not controller.alive:
            return
        controller.kill()
        self.loop.after(restart_s, self._start_controller, name)

    def _start_controller(self, name: str) -> None:
        self.controllers[name] = Controller(self, name)

    def is_gone(self, worker_id: str, incarnation: int) -> bool:
        """Whether a peer's connection to this process would be found closed."""
        worker = self.workers[worker_id]
        return worker.incarnation != incarnation or not worker.alive

    def everyone(self) -> list[Process]:
        return [*self.controllers.values(), *self.workers.values(), self.store.process]

    def ask(self, command: Any) -> None:
        """Somebody gives an order and does not wait for the answer."""
        self.admin.spawn(self._ask(command))

    async def _ask(self, command: Any) -> None:
        try:
            await self.admin.call(command)
        except (Fenced, AssertionError):
            pass  # refused: the worker or the run is gone already

    # ---- what workers draw ----------------------------------------------------------------

    def group_s(self) -> float:
        return self.shape.group_s(self.rng)

    def generate_s(self) -> float:
        return self.shape.generate_s(self.rng)

    def fate(self, lease: cmd.LeasedTask) -> str:
        if lease.kind is not cmd.Kind.TRAIN:
            return ""
        return self.shape.fates.get(int(lease.task_id[1:]), "")

    def group(self, lease: cmd.LeasedTask, first: int, last: int) -> cmd.GroupFacts:
        tokens = self.rng.randrange(10, 100)
        dull = self.rng.random() < 0.1
        return cmd.GroupFacts(
            task_id=lease.task_id,
            attempt=lease.attempt,
            sequences=self.facts.group_size if lease.kind is cmd.Kind.TRAIN else 1,
            prompt_tokens=8,
            tokens=tokens,
            min_version=Version(first),
            max_version=Version(last),
            reward_mean=0.5,
            reward_std=0.0 if dull else 0.5,
            reward_max=1.0,
            version_sum=tokens * (first + last) / 2,
        )

    def send_weights(self, sender: PolicyWorker, link: LinkView, version: int) -> None:
        receiver = self.workers.get(link.receiver.worker_id)
        if isinstance(receiver, RolloutWorker):
            self.network.send(sender.name, receiver, receiver.receive, sender, link.epoch, version)

    # ---- the run --------------------------------------------------------------------------

    def run(self, quiet_after: float, limit: float = 400.0) -> None:
        """To the end of the run. Faults have been planned by the caller, all before ``quiet_after``.

        Raises Violation where a promise is broken, or where the run does not end.
        """
        self.loop.run(quiet_after, self._over)
        self.calm = True
        self.network.loss = 0.0
        self.network.duplicate = min(self.network.duplicate, 0.01)
        self.torn = 0.0
        self._unpause()
        self.loop.run(quiet_after + limit, self._over)
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
            self.ask(cmd.Pause(f"resume at {self.loop.now}", False))
        self.loop.after(5.0, self._unpause)

    def _over(self) -> bool:
        return bool(self.oracle.finished) and all(
            w.exited or not w.alive for w in self.workers.values()
        )
