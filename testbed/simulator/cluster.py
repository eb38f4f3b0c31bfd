"""Surroundings of the simulated processes: time, network, Redis, shared disk and observers."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from controller.ledger.specs import RunSpec
from paceline.config.load import fleet_digest
from paceline.config.schema import Config
from paceline.v1 import worker_pb2
from testbed.simulator.controller_process import ControllerProcess
from testbed.simulator.gradient_mesh import SimulatedEpoch, Weights
from testbed.simulator.memory_store import Landed, MemoryRedis
from testbed.simulator.oracles.ledger import Oracle, Violation
from testbed.simulator.virtual_time import Network, Process, Timeline


@dataclass(frozen=True)
class Shape:
    """Size, timing and manners of one simulated run. Times in seconds."""

    spec: RunSpec
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
    lag: float = 0.0
    """Probability that no replica of Redis has the newest entries when the leader asks."""
    payload_files: bool = False
    """Payloads are files beside the Redis."""
    forgetful: float = 0.0
    """Probability that a worker's reports do not name a lease it works at."""
    fates: dict[int, str] = field(default_factory=dict)
    """Training tasks that kill their worker, fail, or can never succeed, by ordinal."""
    group_fates: dict[int, str] = field(default_factory=dict)
    """Accepted groups that kill each trainer that computes them, that it names as invalid, or whose
    payload vanishes, by ordinal of the task."""
    solved_rows: frozenset[int] = frozenset()
    """Rows whose groups always have equal rewards."""
    seats: int = 0
    """Workers of each role, from number 0 on, that take turns with the one of the other role."""
    scorers: int = 0
    """Scorers at the devices of these seats."""
    lease_ttl_s: float = 3.0
    snapshot_every: int = 60
    """Journal events between two snapshots."""
    fenced: bool = True


class Cluster:
    workers: Mapping[str, Process]
    """The newest process of each worker."""
    REDIS = MemoryRedis

    def __init__(self, seed: int, shape: Shape) -> None:
        self.rng = random.Random(seed)
        self.shape = shape
        self.config = config_of(shape)
        self.config_digest = fleet_digest(self.config)[0]
        self.timeline = self.make_timeline()
        self.network = Network(
            self.timeline,
            loss=shape.loss,
            duplicate=shape.duplicate,
            delay=shape.delay,
            torn=shape.torn,
        )
        self.redis = self.REDIS(
            Process(self.timeline, "redis"),
            self.network,
            fenced=shape.fenced,
            lagging=lambda: self.rng.random() < shape.lag,
            payload_files=shape.payload_files,
        )
        self.oracle = self.make_oracle()
        self.redis.landed = self._landed
        self.redis.saved = self.oracle.saved
        self.trace: Callable[[float, Landed], None] | None = None
        self.watch: Callable[[], None] = lambda: None
        """Called after every journal entry."""
        self.checkpoints: dict[str, Weights] = {"": Weights(0, "initial")}
        self._epochs: dict[bytes, SimulatedEpoch] = {}
        self.on_device: dict[str, dict[str, tuple[int, int]]] = {}
        """Processes that use the devices of a pair, with incarnation and grant, by its seat."""
        self.turning: Callable[[Process, str, str], bool] = lambda worker, act, moment: False
        """True if the worker dies at this moment (before, in or after) of a park or an unpark."""
        self._incarnations = 0
        self._registered: dict[str, tuple[int, Process]] = {}
        self.controllers: dict[str, ControllerProcess] = {}
        for n in range(shape.controllers):
            self.start_controller(f"controller-{n}")
        self.controller_names = list(self.controllers)

    def make_timeline(self) -> Timeline:
        return Timeline(self.rng)

    def make_oracle(self) -> Oracle:
        shape = self.shape
        guilty = {f"t{n}" for n, fate in shape.fates.items() if fate in ("kills", "fails")}
        untrainable = {f"t{n}" for n, fate in shape.group_fates.items() if fate != "vanishes"}
        return Oracle(
            shape.spec,
            self.redis.entries,
            guilty=guilty,
            untrainable=untrainable,
            lost_payloads=self.redis.lost,
        )

    def start_controller(self, name: str) -> None:
        self.controllers[name] = ControllerProcess(name, self.config, self.redis, self.oracle)

    def _landed(self, entry: Landed) -> None:
        self.oracle.landed(entry)
        if self.trace is not None:
            self.trace(self.timeline.now, entry)
        self.watch()

    def new_incarnation(self, worker: Process) -> int:
        self._incarnations += 1
        self._registered[worker.name] = (self._incarnations, worker)
        return self._incarnations

    def seat_of(self, worker_id: str) -> str:
        """Empty: it has devices of its own."""
        number = int(worker_id.rpartition("-")[2])
        if worker_id.startswith("scorer"):
            return f"host/{number % self.shape.seats}:{worker_id}"
        return f"host/{number}" if number < self.shape.seats else ""

    def users_of(self, seat: str) -> dict[str, tuple[int, int]]:
        return self.on_device.setdefault(seat.partition(":")[0], {})

    def occupies(self, seat: str, worker_id: str, incarnation: int, grant: int) -> None:
        """The worker begins to use the devices of its seat."""
        users, may_live = self.users_of(seat), self.oracle.may_live
        for name, (number, _) in users.items():
            # One that was declared dead while it runs learns it with its next directive.
            there = self.workers[name].alive and may_live(name, number)
            alike = not name.startswith("policy") and not worker_id.startswith("policy")
            here = may_live(worker_id, incarnation)
            if name != worker_id and there and here and not alike:
                raise Violation(f"{worker_id} uses {seat}, and so does {name}")
        users[worker_id] = incarnation, grant
        self.oracle.counts["unparked"] += 1

    def is_gone(self, worker_id: str, incarnation: int) -> bool:
        """True if a peer's connection to this process would be found closed."""
        newest, process = self._registered[worker_id]
        return newest != incarnation or not process.alive

    def epoch(self, mesh: worker_pb2.PolicyMesh) -> SimulatedEpoch:
        """The members of an epoch meet by all that the controller says of it."""
        key = mesh.SerializeToString(deterministic=True)
        if key not in self._epochs:
            self._epochs[key] = SimulatedEpoch(self.network, mesh, self.is_gone)
        return self._epochs[key]


def config_of(shape: Shape) -> Config:
    """The controllers' settings; what the run is follows from ``shape.spec``."""
    spec = shape.spec
    config = Config.model_validate(
        {
            "run": {"name": spec.run_name},
            "model": {"path": "/"},
            "data": {"path": "rows"},
            "redis": {"url": "redis://simulated"},
            "rollout": {"group_size": spec.group_size},
            "train": {
                "steps": spec.steps,
                "max_staleness": spec.max_staleness,
                "late_groups": spec.late_groups,
                "max_token_age": spec.max_token_age if spec.trains_late else None,
                "eval_every": spec.eval_every,
                "early_stop_evals": spec.early_stop_evals,
                "eval_drop": spec.eval_drop,
                "eval_limit": max(1, spec.eval_rows),
                "checkpoint_every": spec.checkpoint_every,
            },
            "evaluation": {
                "sets": {
                    each.name: {
                        "path": "rows",
                        "samples": each.samples,
                        "every": each.every or None,
                    }
                    for each in spec.eval_sets
                }
            },
            "fleet": {
                "lease_ttl_s": shape.lease_ttl_s,
                "suspect_grace_s": 0.5,
                "sharing": "turns" if shape.seats else "none",
                "wedged_after_s": 8.0,
            },
            "controller": {"leader_lease_s": 1.0},
            "scorers": {"rm": {"kind": "reward_model", "path": "/"}} if shape.scorers else {},
        }
    )
    # More often than a user may set it: simulated runs are short.
    often = config.controller.model_copy(update={"snapshot_every": shape.snapshot_every})
    return config.model_copy(update={"controller": often})
