"""The leader's work for a large fleet, by the size of the fleet.

The ledger, sessions, directives and liveness that ship run in this process, without gRPC and Redis;
every reporting worker has an open session. Times are CPU times of that one event loop, so other
processes of the machine hardly change them. A publication is: the replicas' votes and the commit,
its directives, then the report of every rollout worker that it has loaded the version, with the
answer to each, and the journal's JSON of all events.

``snapshots`` are the longest pauses of an event loop while a snapshot of many uncovered groups is
taken and saved.

    python -m benchmarks.scale [--parts operations snapshots] [--label after]
"""

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks import runs
from benchmarks.scale import snapshot
from controller.fleet.liveness import Liveness
from controller.fleet.sessions import Sessions
from controller.ledger import Ledger
from controller.ledger import decisions as cmd
from controller.ledger.enums import Lifecycle, Role
from controller.ledger.events import to_json
from controller.ledger.specs import GroupMeta, RunSpec, WorkerSpec
from paceline.config.sections.workers import FleetConfig
from paceline.ids import MeshEpoch, Version
from paceline.v1 import common_pb2, worker_pb2

EIGHTHS = (1, 2, 4, 8)
"""Sizes: eighths of 1,000 rollout workers and 64 policy replicas."""
SNAPSHOT_GROUPS = (20_000, 1_000_000)
GROUPS = 64
REPEATS = 5


class Fleet:
    """A run with ``rollouts`` workers and ``policies`` replicas, as its leader has it in memory."""

    def __init__(self, rollouts: int, policies: int) -> None:
        self.ledger = Ledger()
        self.now = 1000.0
        self.sessions = Sessions(1, self.ledger)
        self.liveness = Liveness(FleetConfig())
        self.rollouts = [f"rollout-{n}" for n in range(rollouts)]
        self.policies = [f"policy-{n}" for n in range(policies)]
        self.seqs: dict[str, int] = {}
        self.do(cmd.begin_term(1, "controller-0"))
        self.do(cmd.start_run(_spec(rollouts, policies)))
        self.liveness.begin(self.ledger, self.now)

    def do(self, command: cmd.Command[Any]) -> Any:
        """Executes a command like the leader, which closes and encodes its batch."""
        reply = command.execute(self.ledger, self.now)
        events = self.ledger.take_events()
        if any(event.directs for event in events):
            self.sessions.collect()
        json.dumps([to_json(event) for event in events])
        return reply

    def register(self, worker_id: str, role: Role) -> None:
        host = f"host-{worker_id}"
        self.do(cmd.register(WorkerSpec(worker_id, 1, role, host, 1, "10.0.0.1")))
        self.liveness.heard(worker_id, 1, self.now)

    def report(self, worker_id: str, *, state: int = -1, loaded: int = -1) -> None:
        """A report comes in over the worker's session, and is answered."""
        session = self.sessions.of(worker_id, 1)
        report = worker_pb2.Report(
            caller=common_pb2.Caller(worker_id=worker_id, incarnation=1),
            lifecycle=worker_pb2.LIFECYCLE_RUNNING,
            state_version=state,
            loaded_version=loaded,
        )
        if session is None:
            session = self.sessions.open(report)
        session.report = report
        self.liveness.observe(report, self.now)
        running = Lifecycle.RUNNING
        self.do(cmd.observe(worker_id, 1, running, Version(state), Version(loaded)))
        self.sessions.send(session, self.sessions.refresh(session))

    def lease(self, worker_id: str, tasks: int, loaded: int) -> cmd.LeaseResult:
        seq = self.seqs[worker_id] = self.seqs.get(worker_id, 0) + 1
        reply: cmd.LeaseResult = self.do(cmd.lease(worker_id, 1, seq, tasks, Version(loaded)))
        return reply

    def fill_step(self) -> None:
        """Accepts the groups of one step, so that it opens."""
        version = self.ledger.state.versions.version
        for lease in self.lease(self.rollouts[0], GROUPS, version).leases:
            sizes, spans = (16, 100, 4096, version, version), ((version, 4096),)
            meta = GroupMeta(
                lease.task_id, lease.attempt, *sizes, 0.5, 0.5, 1.0, token_versions=spans
            )
            self.do(cmd.accept(self.rollouts[0], 1, meta))

    def vote_all(self) -> None:
        step, mesh = self.ledger.state.steps.open, self.ledger.state.fleet.mesh
        assert step is not None and mesh is not None
        for worker_id in self.policies:
            self.do(cmd.vote(worker_id, 1, step.step, MeshEpoch(mesh.epoch), "d", {}))


def _spec(rollouts: int, policies: int) -> RunSpec:
    return RunSpec(
        run_id="scale",
        run_name="scale",
        seed=1,
        steps=1_000_000,
        groups_per_step=GROUPS,
        group_size=16,
        max_staleness=64,
        max_attempts=3,
        dataset_rows=100_000,
        eval_rows=0,
        eval_every=1_000_000,
        checkpoint_every=1_000_000,
        filter_uninformative=False,
        shuffle=True,
        desired={"policy": policies, "rollout": rollouts},
        relay_fanout=0,
    )


def cpu_s(work: Callable[[], Any]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def measure(rollouts: int, policies: int) -> dict[str, float]:
    """CPU times by the columns of tables/scale_fleet.j2."""
    fleet = Fleet(rollouts, policies)
    row: dict[str, float] = {"rollouts": rollouts, "policies": policies}

    def join(worker_id: str, role: Role) -> float:
        took_s = cpu_s(lambda: fleet.register(worker_id, role))
        fleet.report(worker_id)
        return took_s

    joined = [join(worker_id, Role.POLICY) for worker_id in fleet.policies]
    joined += [join(worker_id, Role.ROLLOUT) for worker_id in fleet.rollouts]
    # The last of them find the whole fleet there.
    row["register_ms"] = 1e3 * statistics.median(joined[-50:])
    row["mesh_s"] = cpu_s(lambda: _hold_newest(fleet))
    version = fleet.ledger.state.versions.version
    names = fleet.rollouts[:100]
    row["empty_lease_us"] = 1e6 / len(names) * cpu_s(lambda: _lease_each(fleet, names, -1))
    row["lease_us"] = 1e6 / len(names) * cpu_s(lambda: _lease_each(fleet, names, version))
    publications, commits = [], []
    for _ in range(REPEATS):
        fleet.fill_step()
        commits.append(cpu_s(fleet.vote_all))
        newest = fleet.ledger.state.versions.version
        reports_s = cpu_s(partial(_load_all, fleet, newest))
        publications.append(commits[-1] + reports_s)
    row["publish_s"] = statistics.median(publications)
    row["of_commit_s"] = statistics.median(commits)
    row["collect_ms"] = 1e3 * _median(fleet.sessions.collect)
    row["tick_ms"] = 1e3 * _median(lambda: fleet.liveness.tick(fleet.ledger, fleet.now))
    return row


def _hold_newest(fleet: Fleet) -> None:
    """The replicas meet in their epoch, and each reports the state that it then holds."""
    mesh = fleet.ledger.state.fleet.mesh
    assert mesh is not None
    for worker_id in fleet.policies:
        fleet.report(worker_id, state=mesh.state_version)


def _lease_each(fleet: Fleet, names: Sequence[str], loaded: int) -> None:
    for worker_id in names:
        fleet.lease(worker_id, 1, loaded)


def _load_all(fleet: Fleet, version: int) -> None:
    for worker_id in fleet.rollouts:
        fleet.report(worker_id, loaded=version)


def _median(work: Callable[[], Any]) -> float:
    return statistics.median(cpu_s(work) for _ in range(4 * REPEATS))


PARTS: dict[str, Callable[[], list[Any]]] = {
    "operations": lambda: [measure(125 * eighths, 8 * eighths) for eighths in EIGHTHS],
    "snapshots": lambda: [asyncio.run(snapshot.measure(groups)) for groups in SNAPSHOT_GROUPS],
}


def main() -> None:
    parser = runs.options("scale", __doc__, "scale_fleet")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--label", default="after", help="name of these figures in the results")
    args = parser.parse_args()
    found = runs.Results(args.out).data
    figures = found.setdefault(args.label, {})
    figures["machine"] = found.pop("machine")
    for part in args.parts:
        figures[part] = PARTS[part]()
        runs.write(args.out, found)


if __name__ == "__main__":
    main()
