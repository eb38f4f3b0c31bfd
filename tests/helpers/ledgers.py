"""Ledgers in a wanted state, in a few lines."""

from __future__ import annotations

import json
from typing import Any

from controller.ledger import Ledger
from controller.ledger import commands as cmd
from controller.ledger import events as ev


def facts(**changes: Any) -> cmd.RunFacts:
    """A small run without evaluations: 4 groups of 2 a step, staleness 1."""
    values: dict[str, Any] = {
        "run_id": "run",
        "run_name": "run",
        "seed": 1,
        "steps": 10,
        "groups_per_step": 4,
        "group_size": 2,
        "max_staleness": 1,
        "max_attempts": 3,
        "dataset_rows": 10,
        "eval_rows": 0,
        "eval_every": 5,
        "checkpoint_every": 5,
        "filter_uninformative": False,
        "shuffle": True,
        "desired": {"policy": 1, "rollout": 1},
    }
    return cmd.RunFacts(**{**values, **changes})


def group(lease: cmd.LeasedTask, version: int = 0, **changes: Any) -> cmd.GroupFacts:
    """What a worker would submit for ``lease``, sampled with ``version`` alone."""
    values: dict[str, Any] = {
        "task_id": lease.task_id,
        "attempt": lease.attempt,
        "sequences": 2 if lease.kind is cmd.Kind.TRAIN else 1,
        "prompt_tokens": 5,
        "tokens": 20,
        "min_version": version,
        "max_version": version,
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "reward_max": 1.0,
        "generate_s": 1.0,
        "reward_s": 0.1,
        "version_sum": 20.0 * version,
    }
    return cmd.GroupFacts(**{**values, **changes})


class Driven:
    """A ledger with a journal, and short names for what workers do. Checks itself after each command."""

    def __init__(self, **changes: Any) -> None:
        self.ledger = Ledger(checked=True)
        self.journal: list[dict[str, Any]] = []
        self.now = 1000.0
        self.incarnations = 100
        self.current: dict[str, int] = {}
        self.seqs: dict[str, int] = {}
        self.do(cmd.BeginTerm(1, "controller-0"))
        self.do(cmd.StartRun(facts(**changes)))

    @property
    def state(self) -> Any:
        return self.ledger.state

    def do(self, command: cmd.Command) -> Any:
        """The reply; whatever was decided goes through JSON into the journal."""
        before = self.ledger.fingerprint()
        try:
            events, reply = self.ledger.execute(command, self.now)
        except cmd.Refused:
            assert self.ledger.fingerprint() == before, "a refusal changed the ledger"
            raise
        self.last = events
        self.journal.extend(json.loads(json.dumps(ev.to_json(e))) for e in events)
        assert self.ledger.check() == []
        return reply

    def names(self) -> list[str]:
        """Types of the last command's events."""
        return [type(e).__name__ for e in self.last]

    def event(self, kind: type[Any]) -> Any:
        """The only event of ``kind`` among the last command's."""
        (found,) = [e for e in self.last if isinstance(e, kind)]
        return found

    def failover(self) -> None:
        """Another controller takes over: its ledger is the journal's, nothing else."""
        ledger = Ledger(checked=True)
        for event in self.journal:
            ledger.apply(ev.from_json(event))
        assert ledger.fingerprint() == self.ledger.fingerprint()
        self.ledger = ledger
        self.do(cmd.BeginTerm(self.state.term + 1, f"controller-{self.state.term % 2}"))

    # ---- workers --------------------------------------------------------------------------

    def register(self, worker_id: str, *, state_version: int = -1) -> int:
        role = cmd.Role.POLICY if worker_id.startswith("p") else cmd.Role.ROLLOUT
        self.incarnations += 1
        self.current[worker_id] = self.incarnations
        self.seqs[worker_id] = 0
        self.do(
            cmd.Register(worker_id, self.incarnations, role, "h", 1, "127.0.0.1", 1, state_version)
        )
        return self.incarnations

    def observe(
        self, worker_id: str, lifecycle: str = "running", state: int = -1, loaded: int = -1
    ) -> None:
        self.do(cmd.Observe(worker_id, self.current[worker_id], lifecycle, state, loaded))

    def policy(self, *worker_ids: str) -> None:
        """Registers replicas that are ready, and that hold the newest state."""
        for worker_id in worker_ids:
            self.register(worker_id)
            self.observe(worker_id)
            self.observe(worker_id, state=self.state.versions.version)

    def rollout(self, *worker_ids: str) -> None:
        """Registers rollout workers that serve the newest weights."""
        for worker_id in worker_ids:
            self.register(worker_id)
            self.observe(worker_id, loaded=self.state.versions.version)

    def lease(self, worker_id: str, count: int = 1, version: int | None = None) -> Any:
        self.seqs[worker_id] += 1
        newest = self.state.versions.version
        return self.do(
            cmd.LeaseTasks(
                worker_id,
                self.current[worker_id],
                self.seqs[worker_id],
                count,
                newest if version is None else version,
            )
        )

    def submit(self, worker_id: str, lease: cmd.LeasedTask, version: int = 0, **c: Any) -> Any:
        return self.do(
            cmd.AcceptGroup(worker_id, self.current[worker_id], group(lease, version, **c))
        )

    def return_task(
        self, worker_id: str, lease: cmd.LeasedTask, kind: str, reason: str = "why"
    ) -> Any:
        who = (worker_id, self.current[worker_id])
        return self.do(cmd.ReturnTask(*who, lease.task_id, lease.attempt, kind, reason))

    def fill(self, worker_id: str, count: int, **changes: Any) -> list[cmd.LeasedTask]:
        """Leases ``count`` tasks with the newest weights and submits their groups."""
        newest = self.state.versions.version
        leases = list(self.lease(worker_id, count).leases)
        for lease in leases:
            self.submit(worker_id, lease, newest, **changes)
        return leases

    def vote(self, worker_id: str, digest: str = "same", **changes: Any) -> Any:
        """A vote for the open step, or for what ``changes`` says."""
        step = self.state.steps.open
        values = dict(changes)
        if step is not None:
            values = {
                "step": step.step,
                "round": step.round,
                "mesh_epoch": step.mesh_epoch,
                **changes,
            }
        return self.do(
            cmd.CastVote(
                worker_id,
                self.current[worker_id],
                values["step"],
                values["round"],
                values["mesh_epoch"],
                digest,
                values.get("stats", {}),
            )
        )

    def train(self, worker_id: str = "r0") -> None:
        """One whole step: groups, votes, commit."""
        if self.state.steps.open is None:
            self.fill(worker_id, self.state.run.groups_per_step)
        for member in self.state.fleet.mesh.members:
            self.vote(member.worker_id)

    def die(self, worker_id: str, how: str = "exit") -> None:
        self.do(cmd.DeclareDead(worker_id, self.current[worker_id], how))

    def checkpoint(self, worker_id: str = "p0") -> Any:
        v = self.state.versions
        path = f"checkpoints/step-{v.step}-{v.version}"
        who = (worker_id, self.current[worker_id])
        return self.do(cmd.RecordCheckpoint(*who, v.step, v.version, path))
