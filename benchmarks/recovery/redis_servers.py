"""Faults of Redis: killed, stopped, full, slow, unreachable."""

import os
import signal
import time
from collections.abc import Callable

from benchmarks.recovery.case import Inject, Trial, commit_after, longest_gap
from benchmarks.recovery.fleet_fixtures import ForeignRedis, WatchedByThree
from paceline.redis.client import connect_sync
from testbed.fleets.launched_fleet import LaunchedFleet
from testbed.redis.full_redis import full_redis

HANG_S = 30.0
"""Six leases."""
AWAY_S = 2.0
"""Two of the leader's leases."""
DELAY_S = 0.05
SLOW_FOR_S = 5.0


def embedded_killed(fleet: LaunchedFleet) -> Trial:
    killed = fleet.redis_process()
    at = fleet.mark()
    t0 = time.time()
    os.kill(killed.pid, signal.SIGKILL)
    fleet.until(lambda: fleet.redis_process() != killed)
    detected = time.time()
    committed, _ = commit_after(fleet, detected, at)
    return Trial(detected - t0, committed - t0)


def stopped(fleet: LaunchedFleet) -> Trial:
    """Recovery counts from its continuation."""
    pid = fleet.redis_process().pid
    os.kill(pid, signal.SIGSTOP)
    t0 = time.time()
    detected = _says(fleet, "Redis")
    time.sleep(max(0.0, HANG_S - (detected - t0)))
    at = len(fleet.tail.events)
    os.kill(pid, signal.SIGCONT)
    continued = time.time()
    committed, _ = commit_after(fleet, continued, at)
    return Trial(detected - t0, committed - continued)


def full(fleet: LaunchedFleet) -> Trial:
    """Recovery counts from the moment it has room."""
    client = connect_sync(fleet.url)
    at = fleet.mark()
    t0 = time.time()
    with full_redis(client):
        detected = _says(fleet, "paused: Redis full")
        time.sleep(AWAY_S)
    room = time.time()
    committed, _ = commit_after(fleet, room, at)
    client.close()
    return Trial(detected - t0, committed - room)


def away(fleet: ForeignRedis, go: Callable[[], None], come: Callable[[], None]) -> Trial:
    """Recovery counts from the moment it is back."""
    at = fleet.mark()
    t0 = time.time()
    go()
    detected = _says(fleet, "Redis")
    time.sleep(AWAY_S)
    come()
    back = time.time()
    committed, _ = commit_after(fleet, back, at)
    return Trial(detected - t0, committed - back)


def foreign_slow(fleet: ForeignRedis) -> Trial:
    at = fleet.mark()
    fleet.proxy.delay_s = DELAY_S
    try:
        time.sleep(SLOW_FOR_S)
    finally:
        fleet.proxy.delay_s = 0.0
    fleet.steps(1)
    return Trial(None, longest_gap(fleet, at))


def master_killed(fleet: WatchedByThree) -> Trial:
    fleet.until(fleet.sentinels.settled)
    at = fleet.mark()
    master = fleet.sentinels.master()
    t0 = time.time()
    master.kill()
    fleet.until(lambda: fleet.sentinels.master() is not master)
    replaced = time.time()
    committed, _ = commit_after(fleet, replaced, at)
    # For the next trial: Sentinel makes it the replica of its successor.
    master.start()
    return Trial(replaced - t0, committed - t0)


def _says(fleet: LaunchedFleet, phase: str) -> float:
    """Unix time at which the status first names the phase."""
    found: Callable[[], bool] = lambda: phase in fleet.status().phase  # noqa: E731
    fleet.until(found)
    return time.time()


TRIALS: dict[str, Inject] = {
    "redis-kill": embedded_killed,
    "redis-stop": stopped,
    "redis-full": full,
    "redis-foreign": lambda fleet: away(fleet, fleet.server.kill, fleet.server.start),
    "redis-reset": lambda fleet: away(fleet, fleet.proxy.cut, fleet.proxy.heal),
    "redis-slow": foreign_slow,
    "redis-sentinel": master_killed,
}
