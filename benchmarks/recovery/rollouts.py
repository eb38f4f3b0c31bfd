"""Faults of rollout workers: killed, starved, cut off, or given a poisoned task."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from benchmarks.recovery.case import (
    A_LINE,
    EXIT,
    GAP,
    LEASE,
    RELEASED,
    SERVE_LIMIT_S,
    Case,
    Trial,
    between,
    longest_gap,
    of_worker,
    released_and_leased,
)
from benchmarks.recovery.fleet_fixtures import HOSTS, POISONED
from testbed.fleets.launched_fleet import LaunchedFleet
from testbed.fleets.namespaced_fleet import CONTROLLERS, NamespacedFleet

VICTIM = "rollout-1"
STARVE_S = 7.0
"""Longer than a lease."""
APART_S = 5.0


def rollout_falls(
    instant: str, number: signal.Signals = signal.SIGKILL
) -> Callable[[LaunchedFleet], Trial]:
    def trial(fleet: LaunchedFleet) -> Trial:
        at = fleet.mark()
        t0 = fleet.fall(VICTIM, instant, number)
        detected, _, after = fleet.first(of_worker("WorkerDied", VICTIM), at)
        held, leased = released_and_leased(fleet, VICTIM, at)
        if number == signal.SIGSTOP:
            fleet.send(VICTIM, signal.SIGCONT)
        back, _, after = fleet.first(of_worker("WorkerRegistered", VICTIM), after, SERVE_LIMIT_S)
        serves, *_ = fleet.first(of_worker("TasksLeased", VICTIM), after, SERVE_LIMIT_S)
        recovered = max(detected, leased)
        return Trial(detected - t0, recovered - t0, f"{held} prompts", serves - back)

    return trial


def starved(fleet: LaunchedFleet) -> Trial:
    """To a tenth of its time. Nothing is to be detected: it makes progress."""
    at = fleet.mark()
    fleet.starve(VICTIM, STARVE_S)
    fleet.steps(1)
    end = fleet.mark()
    assert not between(fleet, at, end, "WorkerDied"), "a slow worker was evicted"
    assert not between(fleet, at, end, "TaskReleased"), "its leases were stolen"
    return Trial(None, longest_gap(fleet, at))


def poisoned(fleet: LaunchedFleet) -> Trial:
    """One prompt's, from its first lease to its quarantine; detection is its first failed try."""
    at = fleet.mark()
    dropped, event, end = fleet.first(
        lambda e: e["type"] == "TaskDropped" and e["reason"] == "quarantined", at
    )
    task = event["task_id"]
    events = fleet.tail.events[:end]
    leased = next(
        t for t, e in events if e["type"] == "TasksLeased" and task in (x[0] for x in e["leases"])
    )
    failed = [t for t, e in events if e["type"] == "TaskReleased" and e["task_id"] == task]
    assert event["attempt"] == 3, "after fleet.max_attempts"
    assert not between(fleet, at, end, "WorkerDied"), "no worker dies of it"
    return Trial(failed[0] - leased, dropped - leased, f"{event['attempt']} tries of the prompt")


def rollout_cut_off(cluster: NamespacedFleet) -> Trial:
    at = cluster.mark()
    t0 = time.time()
    cluster.part(VICTIM, *CONTROLLERS)
    detected, *_ = cluster.first(of_worker("WorkerDied", VICTIM), at)
    held, leased = released_and_leased(cluster, VICTIM, at)
    cluster.heal(VICTIM, *CONTROLLERS)
    return Trial(detected - t0, max(detected, leased) - t0, f"{held} prompts")


def weights_cut_off(cluster: NamespacedFleet) -> Trial:
    """Nobody waits for it: what counts is that commits go on."""
    at = cluster.mark()
    cluster.part(VICTIM, "policy-0", "policy-1")
    try:
        time.sleep(APART_S)
    finally:
        cluster.heal(VICTIM, "policy-0", "policy-1")
    cluster.steps(1)
    return Trial(None, longest_gap(cluster, at))


CASES = {
    **{
        f"rollout-{instant}": Case(
            rollout_falls(instant), f"rollout worker: kill -9 {where}", EXIT, RELEASED, A_LINE
        )
        for instant, where in (
            ("generate", "mid-generation"),
            ("submit", "mid-submit"),
            ("receive", "mid-weight-receive"),
        )
    },
    "rollout-stop": Case(
        rollout_falls("generate", signal.SIGSTOP),
        *(
            "rollout worker: SIGSTOP",
            LEASE,
            RELEASED,
            f"{A_LINE}; after SIGCONT it registers again",
        ),
    ),
    "rollout-starved": Case(
        starved,
        *("rollout worker: a tenth of its time, for 7 s", "not a fault", GAP),
        "it is not evicted, and its tasks stay its own",
    ),
    "rollout-cut": Case(
        rollout_cut_off,
        *("network: rollout worker cut off from the controllers", LEASE, RELEASED),
        f"{A_LINE}; once reachable, it registers again",
        HOSTS,
    ),
    "rollout-weights": Case(
        weights_cut_off,
        *("network: rollout worker cut off from the replicas for 5 s", "the transfer fails", GAP),
        "its weights stay at one version meanwhile",
        HOSTS,
    ),
    "task-poisoned": Case(
        poisoned,
        *(
            "poisoned task: its reward kills the scoring process",
            "the attempt fails",
            "quarantined",
        ),
        "the task and the reason of every attempt in the events",
        POISONED,
    ),
}
