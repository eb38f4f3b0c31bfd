"""Decisions about the causes of deaths."""

from controller.ledger import events as ev
from controller.ledger.decisions.commands import Decider, command
from controller.ledger.specs import WorkerSpec
from controller.ledger.state.fleet import Worker
from paceline.observe.vocabulary import FaultCause

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


@command
def record_fault(
    d: Decider,
    now: float,
    request_id: str,
    name: str,
    host: str,
    pid: int,
    cause: FaultCause,
    detail: str = "",
) -> None:
    """A launcher saw a fault of a process that is no worker, or of one that still runs. Idempotent
    by request_id."""
    if d.state.ended or request_id in d.state.requests:
        return
    worker = d.state.fleet.workers.get(name)
    if worker is not None and (worker.pid, worker.host) == (pid, host) and not worker.alive:
        # The word was slower than the lease.
        explain(d, worker, cause, detail)
        return
    d.emit(ev.ProcessFault(request_id, name, host, pid, cause, detail, now))


def explain(d: Decider, worker: Worker, cause: FaultCause, detail: str) -> None:
    """Better evidence about a dead worker than that on which it was declared dead."""
    if worker.death in _UNSETTLED and cause not in (worker.death, FaultCause.UNATTRIBUTED):
        d.emit(ev.FaultExplained(*worker.who, cause, detail))


def explain_by_return(d: Decider, dead: Worker, c: WorkerSpec, stalled_s: float) -> None:
    """A worker is back: its very process, which then was only out of reach, or another one."""
    if (c.pid, c.host) == (dead.pid, dead.host):
        if stalled_s >= max(STALL_S, dead.silent_s / 2):
            words = f"its process did not run for {stalled_s:.1f} s"
            explain(d, dead, FaultCause.STOPPED, words)
        else:
            words = "its process ran all the time and could not reach the controllers"
            explain(d, dead, FaultCause.NETWORK_PARTITION, words)
    elif c.cgroup and c.cgroup == dead.cgroup and 0 <= dead.memory_kills < c.memory_kills:
        words = f"the kernel has killed in cgroup {c.cgroup} since it had registered"
        explain(d, dead, FaultCause.OUT_OF_MEMORY, words)
