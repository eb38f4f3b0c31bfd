"""Faults of policy replicas and of their network."""

import signal
import time
from collections.abc import Callable

import psutil

from benchmarks.recovery.case import (
    SERVE_LIMIT_S,
    Inject,
    Trial,
    between,
    commit_after,
    kind,
    of_worker,
)
from testbed.faults import failpoints
from testbed.fleets.launched_fleet import LaunchedFleet
from testbed.fleets.namespaced_fleet import CONTROLLERS, NamespacedFleet

APART_S = 5.0


def replica_falls(
    instant: str, number: signal.Signals = signal.SIGKILL
) -> Callable[[LaunchedFleet], Trial]:
    def trial(fleet: LaunchedFleet) -> Trial:
        victim = "policy-1"
        if instant == "send":
            links = [e for _, e in fleet.tail.events if e["type"] == "LinkAssigned"]
            victim = links[-1]["publisher"]
        at = fleet.mark()
        t0 = fleet.fall(victim, instant, number)
        return _follow(fleet, victim, at, t0, number)

    return trial


def rank_killed(fleet: LaunchedFleet) -> Trial:
    """Rank 1 of a replica of two, at any instant."""
    victim = "policy-1"
    follower = next(
        child
        for child in psutil.Process(fleet.process(victim).pid).children()
        if "policy_worker" in child.cmdline()
    )
    at = fleet.mark()
    t0 = time.time()
    follower.kill()
    return _follow(fleet, victim, at, t0)


def _follow(
    fleet: LaunchedFleet,
    victim: str,
    at: int,
    t0: float,
    number: signal.Signals = signal.SIGKILL,
) -> Trial:
    """Consequences of the fall of ``victim`` at ``t0``, until its replacement has voted."""
    detected, _, after = fleet.first(of_worker("WorkerDied", victim), at)
    committed, _, end = fleet.first(kind("StepCommitted"), after)
    open_step = [e for _, e in fleet.tail.events[:after] if e["type"] == "StepOpened"][-1:]
    moved = between(fleet, at, end, "StepResharded")
    lost = len(open_step[0]["shards"].get(victim, ())) if moved and open_step else 0
    if number == signal.SIGSTOP:
        fleet.send(victim, signal.SIGCONT)
    registered, _, after = fleet.first(of_worker("WorkerRegistered", victim), after, SERVE_LIMIT_S)
    voted, *_ = fleet.first(of_worker("VoteCast", victim), after, SERVE_LIMIT_S)
    repeated = f"{lost} of 4 groups of the step" if lost else "none"
    return Trial(detected - t0, committed - t0, repeated, voted - registered)


def source_killed(fleet: LaunchedFleet) -> Trial:
    """The one of two survivors that sends the state to the replacement of the third."""
    joiner = "policy-2"
    mesh = [e for _, e in fleet.tail.events if e["type"] == "MeshFormed"][-1]
    source = next(m["worker_id"] for m in mesh["members"] if m["worker_id"] != joiner)
    fallen = failpoints.fall(fleet.armed, fleet.process(source).pid, "state_transfer")
    at = fleet.mark()
    fleet.send(joiner)
    t0 = fallen(SERVE_LIMIT_S)
    detected, _, after = fleet.first(of_worker("WorkerDied", source), at)
    committed, *_ = fleet.first(kind("StepCommitted"), after)
    return Trial(detected - t0, committed - t0)


def all_replicas_killed(fleet: LaunchedFleet) -> Trial:
    at = fleet.mark()
    t0 = time.time()
    for name in sorted(w for w in fleet.workers() if w.startswith("policy")):
        fleet.send(name)
    detected, _, after = fleet.first(kind("WorkerDied"), at)
    registered, *_ = fleet.first(kind("WorkerRegistered"), after, SERVE_LIMIT_S)
    committed, _, end = fleet.first(kind("StepCommitted"), after, SERVE_LIMIT_S)
    steps = sum(e["from_step"] - e["step"] for e in between(fleet, at, end, "RolledBack"))
    return Trial(
        detected - t0, committed - t0, f"{steps} steps since the checkpoint", committed - registered
    )


def replica_cut_off(cluster: NamespacedFleet) -> Trial:
    victim = "policy-1"
    at = cluster.mark()
    t0 = time.time()
    cluster.part(victim, *CONTROLLERS)
    detected, _, after = cluster.first(of_worker("WorkerDied", victim), at)
    committed, *_ = cluster.first(kind("StepCommitted"), after)
    cluster.heal(victim, *CONTROLLERS)
    return Trial(detected - t0, committed - t0)


def replicas_apart(cluster: NamespacedFleet) -> Trial:
    """Recovery counts from the return of the network."""
    at = cluster.mark()
    cluster.part("policy-0", "policy-1")
    time.sleep(APART_S)
    cluster.heal("policy-0", "policy-1")
    healed = time.time()
    committed, _ = commit_after(cluster, healed, at)
    return Trial(None, committed - healed)


TRIALS: dict[str, Inject] = {
    **{
        f"policy-{instant}": replica_falls(instant)
        for instant in ("idle", "forward", "reduce", "vote", "commit", "send")
    },
    "policy-stop": replica_falls("reduce", signal.SIGSTOP),
    "policy-three": replica_falls("reduce"),
    "policy-state-transfer": source_killed,
    "policy-rank": rank_killed,
    "policy-last": all_replicas_killed,
    "policies-kill": all_replicas_killed,
    "policy-cut": replica_cut_off,
    "policies-apart": replicas_apart,
}
