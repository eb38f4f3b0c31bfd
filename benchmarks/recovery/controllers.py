"""Faults of controllers, of their network and of ``paceline up``, and power cuts."""

import signal
import time

from benchmarks.recovery.case import SERVE_LIMIT_S, Inject, Trial, commit_after, kind
from testbed.faults.network_namespaces import HUB
from testbed.fleets.launched_fleet import LaunchedFleet
from testbed.fleets.local_run import Up
from testbed.fleets.namespaced_fleet import NamespacedFleet


def leader_falls(fleet: LaunchedFleet, number: signal.Signals) -> Trial:
    leader = fleet.status().leader
    at = fleet.mark()
    t0 = fleet.send(leader, number)
    detected, _, after = fleet.first(kind("TermBegun"), at)
    served, *_ = fleet.first(lambda e: e["type"] != "TermBegun", after)
    if number == signal.SIGSTOP:
        fleet.send(leader, signal.SIGCONT)
    return Trial(detected - t0, served - t0)


def leader_cut_off(cluster: NamespacedFleet) -> Trial:
    """Cuts the leader off from Redis, and not from its workers."""
    leader = cluster.status().leader
    at = cluster.mark()
    t0 = time.time()
    cluster.part(leader, HUB)
    detected, _, after = cluster.first(kind("TermBegun"), at)
    served, *_ = cluster.first(lambda e: e["type"] != "TermBegun", after)
    cluster.heal(leader, HUB)
    return Trial(detected - t0, served - t0)


def standby_killed(fleet: LaunchedFleet) -> Trial:
    leader = fleet.status().leader
    standby = next(n for n in ("controller-0", "controller-1") if n != leader)
    before = fleet.process(standby)
    t0 = fleet.send(standby)

    def back() -> bool:
        found = {c.controller_id: (c.pid, c.state) for c in fleet.status().controllers}
        return bool(found.get(standby, (before.pid, ""))[0] != before.pid)

    fleet.until(back)
    return Trial(None, time.time() - t0)


def all_controllers_killed(fleet: LaunchedFleet) -> Trial:
    at = fleet.mark()
    t0 = time.time()
    for name in ("controller-0", "controller-1"):
        fleet.send(name)
    detected, _, after = fleet.first(kind("TermBegun"), at)
    served, *_ = fleet.first(lambda e: e["type"] != "TermBegun", after)
    return Trial(detected - t0, served - t0)


def supervisor_killed(fleet: LaunchedFleet) -> Trial:
    fleet.up.process.kill()
    fleet.up.process.wait()
    t0 = time.time()
    fleet.up = Up(fleet.config, fleet.run_dir, "--attach", environment=fleet.environment)
    pid = fleet.up.process.pid
    fleet.until(lambda: fleet.record().supervisor.pid == pid)
    return Trial(None, time.time() - t0)


def power_cut(fleet: LaunchedFleet) -> Trial:
    t0 = time.time()
    fleet.kill_everything()
    killed = time.time()
    fleet.start_again()
    committed, at = commit_after(fleet, killed, 0, SERVE_LIMIT_S)
    rolled = [e for t, e in fleet.tail.events[:at] if e["type"] == "RolledBack" and t > t0]
    steps = sum(e["from_step"] - e["step"] for e in rolled)
    return Trial(None, committed - killed, f"{steps} steps since the checkpoint")


TRIALS: dict[str, Inject] = {
    "leader-kill": lambda fleet: leader_falls(fleet, signal.SIGKILL),
    "leader-stop": lambda fleet: leader_falls(fleet, signal.SIGSTOP),
    "leader-cut": leader_cut_off,
    "standby-kill": standby_killed,
    "controllers-kill": all_controllers_killed,
    "supervisor-kill": supervisor_killed,
    "power-cut": power_cut,
}
