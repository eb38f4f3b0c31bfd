"""Decisions about the causes of deaths, and about hosts with many faults."""

from controller.ledger import commands as cmd
from controller.ledger import events as ev
from controller.ledger.decisions.decider import Decider, decides
from controller.ledger.enums import Phase
from controller.ledger.state.fleet import Worker
from paceline.observe.vocabulary import ATTRIBUTED, NO_FAULT, DeathCause, FaultCause

BLAME_WINDOW_S = 600.0
BLAME_FAULTS = 3
BLAME_WORKERS = 2
"""A host is suspected after so many faults of so many of its processes within the window, if these
are more than half of all faults in it and the fleet has another host."""
STALL_S = 1.0  # A process that did not run for that long, and for half of its silence, was stopped
SEEN_S = 2.0  # A launcher looks at its processes more often
_UNSETTLED = frozenset(
    {
        FaultCause.UNATTRIBUTED,
        FaultCause.HEARTBEAT_SILENCE,
        FaultCause.COLLECTIVE_ERROR,
        FaultCause.HOST_LOST,
    }
)  # Causes that better evidence may replace


def cause_of_death(d: Decider, worker: Worker, c: cmd.DeclareDead, now: float) -> FaultCause:
    """``c.cause``, unless more is known: it was asked to leave, or its launcher saw it stopped."""
    if worker.leaving:
        return FaultCause.ASKED_TO_LEAVE
    if c.how is DeathCause.EXIT:
        return c.cause
    seen = d.state.faults.last_of(worker.worker_id, now)
    if (
        seen is not None
        and seen.cause is FaultCause.STOPPED
        and seen.pid == worker.pid
        and now - seen.t <= c.silent_s + SEEN_S
    ):
        return FaultCause.STOPPED
    return c.cause


@decides
def record_fault(d: Decider, c: cmd.RecordFault, now: float) -> None:
    if d.state.ended or c.request_id in d.state.requests:
        return
    if c.cause is FaultCause.LATE:
        seen = d.state.faults.last_of(c.name, now)
        if seen is None or seen.cause in ATTRIBUTED:
            return  # nobody has missed it, or its launcher has said more
    worker = d.state.fleet.workers.get(c.name)
    if worker is not None and (worker.pid, worker.host) == (c.pid, c.host) and not worker.alive:
        # The word was slower than the lease.
        explain(d, worker, c.cause, c.detail)
        return
    d.emit(ev.ProcessFault(c.request_id, c.name, c.host, c.pid, c.cause, c.detail, now))
    blame_host(d, c.host, now)


def record_early_end(d: Decider, c: cmd.RecordExit, now: float) -> None:
    """A process that is not the current one of its name: a fault, unless it has one already."""
    s = d.state
    if s.ended or s.phase is Phase.SUSPENDED or c.cause in NO_FAULT or not c.pid:
        return
    known = s.faults.of_process(c.name, c.host, c.pid)
    if known is not None and (known.cause in ATTRIBUTED or c.cause not in ATTRIBUTED):
        return
    if known is not None and known.incarnation:
        d.emit(ev.FaultExplained(c.name, known.incarnation, c.cause, c.detail))
        return
    request_id = f"exit-{c.name}-{c.host}-{c.pid}"
    d.emit(ev.ProcessFault(request_id, c.name, c.host, c.pid, c.cause, c.detail, now))
    blame_host(d, c.host, now)


def explain(d: Decider, worker: Worker, cause: FaultCause, detail: str) -> None:
    """Better evidence about a dead worker than that on which it was declared dead."""
    if worker.death in _UNSETTLED and cause not in (worker.death, FaultCause.UNATTRIBUTED):
        d.emit(ev.FaultExplained(worker.worker_id, worker.incarnation, cause, detail))


def explain_by_return(d: Decider, dead: Worker, c: cmd.Register) -> None:
    """A worker is back: its very process, which then was only out of reach, or another one."""
    if (c.pid, c.host) == (dead.pid, dead.host):
        if c.stalled_s >= max(STALL_S, dead.silent_s / 2):
            words = f"its process did not run for {c.stalled_s:.1f} s"
            explain(d, dead, FaultCause.STOPPED, words)
        else:
            words = "its process ran all the time and could not reach the controllers"
            explain(d, dead, FaultCause.NETWORK_PARTITION, words)
    elif c.cgroup and c.cgroup == dead.cgroup and 0 <= dead.memory_kills < c.memory_kills:
        words = f"the kernel has killed in cgroup {c.cgroup} since it had registered"
        explain(d, dead, FaultCause.OUT_OF_MEMORY, words)


def blame_host(d: Decider, host: str, now: float) -> None:
    s = d.state
    others = any(w.host != host for w in s.fleet.workers.values())
    if not host or not others or now - s.faults.blamed.get(host, -BLAME_WINDOW_S) < BLAME_WINDOW_S:
        return
    recent = [f for f in s.faults.recent if now - f.t < BLAME_WINDOW_S]
    here = [f for f in recent if f.host == host]
    names = tuple(sorted({f.name for f in here}))
    if len(here) >= BLAME_FAULTS and len(names) >= BLAME_WORKERS and 2 * len(here) > len(recent):
        d.emit(ev.HostBlamed(host, len(here), names, BLAME_WINDOW_S, now))
