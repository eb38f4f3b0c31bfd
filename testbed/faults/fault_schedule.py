"""Random faults on a running local fleet, on a schedule that a seed decides.

    fleet.json ──► Targets ──► plan(seed) ──► kill | stop … continue

- Only processes that the run's own ``fleet.json`` names are touched, and each only while it is the
  very process that was recorded (id and start time): the system reuses ids.
- The plan is pure: the same seed gives the same faults at the same times. Which process a fault
  hits is drawn from roles and ranks, so that it does not depend on process ids.
- Whatever was stopped is continued, also when chaos itself is interrupted.
- Killed processes are restarted by the run's supervisor, as ever; chaos starts nothing.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.observe.fleet_file import FleetRecord, ProcessId

CALM_S = 3.0
"""Shortest time between two faults."""
MEAN_GAP_S = 8.0
LONGEST_STOP_S = 12.0
ROLE_WEIGHTS = {"controller": 3, "policy": 3, "rollout": 4, "redis": 1}
STOP_SHARE = 0.4
BURST_SHARE = 0.15
"""Of the faults hit every process of the role at once."""


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    """Seconds after the start of the schedule."""
    role: str
    pick: float
    """In [0, 1): which of the role's processes, by name."""
    stop_s: float
    """0: SIGKILL. Otherwise SIGSTOP, and SIGCONT so many seconds later."""
    everyone: bool
    """All processes of the role at once."""

    def __str__(self) -> str:
        what = f"SIGSTOP for {self.stop_s:.1f} s" if self.stop_s else "SIGKILL"
        whom = f"every {self.role}" if self.everyone else f"a {self.role}"
        return f"{self.at_s:7.1f} s  {what} to {whom}"


def plan(seed: int, minutes: float) -> list[Fault]:
    """Faults of ``minutes``, in the order of their times. Pure."""
    draw = random.Random(seed)
    faults: list[Fault] = []
    at = CALM_S
    roles, weights = list(ROLE_WEIGHTS), list(ROLE_WEIGHTS.values())
    while at < minutes * 60.0:
        role = draw.choices(roles, weights)[0]
        stop_s = draw.uniform(0.5, LONGEST_STOP_S) if draw.random() < STOP_SHARE else 0.0
        everyone = draw.random() < BURST_SHARE
        faults.append(Fault(at, role, draw.random(), stop_s, everyone))
        at += CALM_S + draw.expovariate(1.0 / (MEAN_GAP_S - CALM_S))
    return faults


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    identity: ProcessId


def targets(run_dir: Path, role: str) -> list[Target]:
    """Living processes of ``role`` (controller, policy, rollout or redis), sorted by name."""
    record = FleetRecord.read(run_dir)
    if record is None:
        return []
    if role == "redis":
        return [Target("redis", i) for i in record.redis[-1:] if i.alive()]
    newest = {p.name: p.ids[-1] for p in record.processes if p.role == role and p.ids}
    return [Target(name, i) for name, i in sorted(newest.items()) if i.alive()]


def pick(found: Sequence[Target], fault: Fault) -> list[Target]:
    """Those of ``found`` that the fault hits."""
    if not found or fault.everyone:
        return list(found)
    return [found[int(fault.pick * len(found))]]


def send(target: Target, number: signal.Signals) -> bool:
    """False if that very process is gone."""
    try:
        # The descriptor pins the process: between check and signal its id cannot be reused.
        descriptor = os.pidfd_open(target.identity.pid)
    except OSError:
        return False
    try:
        if not target.identity.alive():
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


class Mayhem:
    """Carries a plan out on one fleet; ``note`` gets a line for each thing done."""

    def __init__(self, run_dir: Path, note: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._note = note
        self._stopped: list[tuple[float, Target]] = []
        """(when to continue, process), in no order."""
        self.done: list[dict[str, object]] = []

    def run(self, faults: Sequence[Fault], over: Callable[[], bool]) -> None:
        """Blocks until the last fault is done and undone, or ``over()``."""
        begun = time.monotonic()
        try:
            for fault in faults:
                if not self._sleep_until(begun + fault.at_s, over):
                    return
                self._strike(fault)
            while self._stopped and not over():
                self._sleep_until(min(t for t, _ in self._stopped), over)
        finally:
            self.release()

    def release(self) -> None:
        """Continues everything that is still stopped."""
        for _, target in self._stopped:
            send(target, signal.SIGCONT)
        self._stopped.clear()

    def _strike(self, fault: Fault) -> None:
        hit = pick(targets(self._run_dir, fault.role), fault)
        number = signal.SIGSTOP if fault.stop_s else signal.SIGKILL
        for target in hit:
            if not send(target, number):
                continue
            if fault.stop_s:
                self._stopped.append((time.monotonic() + fault.stop_s, target))
            self.done.append(
                {"t": time.time(), "process": target.name, "signal": number.name}
                | ({"seconds": fault.stop_s} if fault.stop_s else {})
            )
            how = f"stopped for {fault.stop_s:.1f} s" if fault.stop_s else "killed"
            self._note(f"{target.name} (pid {target.identity.pid}) {how}")

    def _sleep_until(self, deadline: float, over: Callable[[], bool]) -> bool:
        """Continues what is due meanwhile. False if it is over first."""
        while (now := time.monotonic()) < deadline:
            if over():
                return False
            for entry in [e for e in self._stopped if e[0] <= now]:
                self._stopped.remove(entry)
                send(entry[1], signal.SIGCONT)
            # There is no event to await: other processes' lives are watched by looking.
            time.sleep(min(0.1, deadline - now))
        self._stopped = [e for e in self._stopped if e[0] > now or not send(e[1], signal.SIGCONT)]
        return not over()
