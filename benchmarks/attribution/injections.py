"""Faults that are injected, and the causes that the ledger should give them.

inject ──► the ledger has a fault of that very process ──► undo ──► the fleet is whole again and at
its pace
"""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis

from benchmarks.attribution.hosts import CONTROLLERS, LEASE_S, REDIS, WORKERS, TwoHosts
from paceline.observe.vocabulary import FaultCause
from paceline.rpc.client import ControlPlaneUnavailable
from testbed.faults.memory_group import enter

ERROR_STATUS = 3
NOTICED_S = 90.0
"""After so long the fault counts as missed."""
SEEN_S = 1.5
"""A launcher has looked at its process again by then."""
LOST_NODE = 1


@dataclass(frozen=True, slots=True)
class Expected:
    name: str
    pid: int
    cause: FaultCause


Injection = Callable[["Scene"], list[Expected]]


@dataclass(eq=False)
class Scene:
    """One fleet, a source of chance, and a control group with a limit of memory, if possible."""

    fleet: TwoHosts
    draw: random.Random
    group: Path | None
    since: float = 0.0
    """Start of the newest injection, in Unix seconds."""

    def worker(self) -> str:
        return self.draw.choice(list(WORKERS))

    def controller(self) -> str:
        return self.draw.choice(CONTROLLERS)

    def leader(self) -> str:
        return self.fleet.leader()

    def signal(self, name: str, number: signal.Signals, cause: FaultCause) -> Expected:
        identity = self.fleet.process(name)
        os.kill(identity.pid, number)
        return Expected(name, identity.pid, cause)

    def noticed(self, expected: list[Expected]) -> bool:
        """Waits until the ledger has a new fault of each of these processes."""
        deadline = time.monotonic() + NOTICED_S
        wanted = {(fault.name, fault.pid) for fault in expected}
        while time.monotonic() < deadline:
            if wanted <= self._known():
                return True
            # Redis and every controller may be away: there is no event to await.
            time.sleep(0.5)
        return False

    def _known(self) -> set[tuple[str, int]]:
        try:
            faults = self.fleet.faults().recent
        except (redis.RedisError, OSError, TimeoutError, ValueError):
            return set()
        return {(fault.name, fault.pid) for fault in faults if fault.t >= self.since}


def signalled(
    victim: Callable[[Scene], str], number: signal.Signals, cause: FaultCause
) -> Injection:
    """A process gets a signal that ends it."""
    return lambda scene: [scene.signal(victim(scene), number, cause)]


def exit_with_error(scene: Scene) -> list[Expected]:
    name = scene.worker()
    expected = Expected(name, scene.fleet.process(name).pid, FaultCause.ERROR)
    scene.fleet.leave(name, ERROR_STATUS)
    return [expected]


def stop_worker(scene: Scene) -> list[Expected]:
    expected = scene.signal(scene.worker(), signal.SIGSTOP, FaultCause.STOPPED)
    try:
        _until_dead(scene, expected.name)
    finally:
        os.kill(expected.pid, signal.SIGCONT)
    return [expected]


def lack_memory(scene: Scene) -> list[Expected]:
    assert scene.group is not None
    name = scene.worker()
    expected = Expected(name, scene.fleet.process(name).pid, FaultCause.OUT_OF_MEMORY)
    enter(scene.group, expected.pid)
    time.sleep(SEEN_S)  # its launcher notes the count of its new group
    scene.fleet.eat_memory(name)
    return [expected]


def kill_before_registration(scene: Scene) -> list[Expected]:
    """The worker is killed, and its successor as soon as there is one."""
    first = scene.signal(scene.worker(), signal.SIGKILL, FaultCause.KILLED)
    scene.fleet.until(lambda: scene.fleet.process(first.name).pid != first.pid)
    return [first, scene.signal(first.name, signal.SIGKILL, FaultCause.KILLED)]


def stop_leader(scene: Scene) -> list[Expected]:
    expected = [scene.signal(scene.leader(), signal.SIGSTOP, FaultCause.STOPPED)]
    try:
        scene.noticed(expected)
    finally:
        os.kill(expected[0].pid, signal.SIGCONT)
    return expected


def stop_redis(scene: Scene) -> list[Expected]:
    expected = scene.signal(REDIS, signal.SIGSTOP, FaultCause.STOPPED)
    try:
        time.sleep(LEASE_S)  # nothing can be written meanwhile, so nothing can be awaited
    finally:
        os.kill(expected.pid, signal.SIGCONT)
    return [expected]


def cut_network(scene: Scene) -> list[Expected]:
    """The host's cable is pulled until both of its workers are dead, and put back."""
    hosts = scene.fleet.nodes.hosts
    expected = [
        Expected(name, scene.fleet.process(name).pid, FaultCause.NETWORK_PARTITION)
        for name, node in WORKERS.items()
        if node == LOST_NODE
    ]
    hosts.cut(f"node{LOST_NODE}")
    try:
        scene.noticed(expected)
    finally:
        hosts.mend(f"node{LOST_NODE}")
    return expected


def lose_host(scene: Scene) -> list[Expected]:
    """Everything on the host ends without a word to anybody, and a new one takes its place."""
    nodes = scene.fleet.nodes
    expected = [
        Expected(name, scene.fleet.process(name).pid, FaultCause.HOST_LOST)
        for name, node in WORKERS.items()
        if node == LOST_NODE
    ]
    nodes.hosts.cut(f"node{LOST_NODE}")
    nodes.kill_all_of(LOST_NODE)
    try:
        scene.noticed(expected)
    finally:
        nodes.hosts.mend(f"node{LOST_NODE}")
        nodes.start(LOST_NODE)
    return expected


def _until_dead(scene: Scene, name: str) -> None:
    """Waits until the worker's lease is over."""

    def dead() -> bool:
        try:
            states = {w.worker_id: w.state for w in scene.fleet.status(timeout_s=5.0).workers}
        except ControlPlaneUnavailable:
            return False
        return bool(states.get(name, "dead") == "dead")

    scene.fleet.until(dead, NOTICED_S)


KINDS: dict[str, Injection] = {
    "worker: SIGKILL": signalled(Scene.worker, signal.SIGKILL, FaultCause.KILLED),
    "worker: SIGSEGV": signalled(Scene.worker, signal.SIGSEGV, FaultCause.CRASHED),
    "worker: error exit": exit_with_error,
    "worker: SIGSTOP": stop_worker,
    "worker: out of memory": lack_memory,
    "worker: SIGKILL, again before it registers": kill_before_registration,
    "controller: SIGKILL": signalled(Scene.controller, signal.SIGKILL, FaultCause.KILLED),
    "leader: SIGKILL": signalled(Scene.leader, signal.SIGKILL, FaultCause.KILLED),
    "leader: SIGSTOP": stop_leader,
    "Redis: SIGKILL": signalled(lambda scene: REDIS, signal.SIGKILL, FaultCause.KILLED),
    "Redis: SIGSTOP": stop_redis,
    "host: cable pulled": cut_network,
    "host: lost": lose_host,
}
