"""Faults of rollout workers: killed, starved, cut off, or given a poisoned task."""

import signal
import time
from collections.abc import Callable

from benchmarks.recovery.case import (
    SERVE_LIMIT_S,
    Inject,
    Trial,
    between,
    longest_gap,
    of_worker,
    released_and_leased,
)
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
    """Gives a worker a tenth of its time. It makes progress, so nothing is to be detected."""
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
    """Cuts a worker off from weights. Nobody waits for it: commits must go on."""
    at = cluster.mark()
    cluster.part(VICTIM, "policy-0", "policy-1")
    try:
        time.sleep(APART_S)
    finally:
        cluster.heal(VICTIM, "policy-0", "policy-1")
    cluster.steps(1)
    return Trial(None, longest_gap(cluster, at))


TRIALS: dict[str, Inject] = {
    **{
        f"rollout-{instant}": rollout_falls(instant)
        for instant in ("generate", "submit", "receive")
    },
    "rollout-stop": rollout_falls("generate", signal.SIGSTOP),
    "rollout-starved": starved,
    "rollout-cut": rollout_cut_off,
    "rollout-weights": weights_cut_off,
    "task-poisoned": poisoned,
}
