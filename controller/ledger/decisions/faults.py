"""Decisions about the causes of deaths."""

from controller.ledger import commands as cmd
from controller.ledger import events as ev
from controller.ledger.decisions.decider import Decider, decides
from controller.ledger.enums import Phase
from controller.ledger.state.fleet import Worker
from paceline.observe.vocabulary import NO_FAULT, DeathCause, FaultCause

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


def cause_of_death(worker: Worker, c: cmd.DeclareDead, now: float) -> FaultCause:
    """``c.cause``, unless more is known: it was asked to leave, or its launcher saw it stopped."""
    if worker.leaving:
        return FaultCause.ASKED_TO_LEAVE
    stopped = worker.stopped_t and now - worker.stopped_t <= c.silent_s + SEEN_S
    return FaultCause.STOPPED if stopped and c.how is not DeathCause.EXIT else c.cause


@decides
def record_fault(d: Decider, c: cmd.RecordFault, now: float) -> None:
    if d.state.ended or c.request_id in d.state.requests:
        return
    worker = d.state.fleet.workers.get(c.name)
    if worker is not None and (worker.pid, worker.host) == (c.pid, c.host) and not worker.alive:
        # The word was slower than the lease.
        explain(d, worker, c.cause, c.detail)
        return
    d.emit(ev.ProcessFault(c.request_id, c.name, c.host, c.pid, c.cause, c.detail, now))


def record_early_end(d: Decider, c: cmd.RecordExit, now: float) -> None:
    """The end of a process that is not the current one of its name."""
    s, request_id = d.state, f"exit-{c.name}-{c.host}-{c.pid}"
    if s.ended or s.phase is Phase.SUSPENDED or request_id in s.requests:
        return
    if c.cause not in NO_FAULT and c.pid:
        who = (request_id, c.name, c.host, c.pid)
        d.emit(ev.ProcessFault(*who, c.cause, c.detail, now, over=True))


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
