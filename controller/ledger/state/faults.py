"""Faults of a run: their causes and hosts, the time that each has cost, and the share of time spent
training.

    fault ──► commits come late ──► two commits in a row at the usual pace: the fault is over

- The usual pace is the median time between the last commits. An interval that is half as long again
  is late; what it has more than usual is lost.
- A loss is shared by the faults that are open in the interval. Steps that a rollback undoes are
  lost too.
- An interval in which the run was stopped, or had no commit before it, counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from controller.ledger.enums import ATTRIBUTED, FaultCause

KEPT = 256
"""Newest faults that are kept one by one."""
HOSTS_KEPT = 1024
PACE = 31
"""Commits whose intervals make the usual pace."""
PACE_LEAST = 5
LATE = 1.5
LATE_S = 0.1
"""Below it a late commit is jitter."""
CALM = 2
"""Commits in a row at the usual pace after which a fault is over."""
SAME_S = 30.0
"""Two words about one process within it are about the same fault."""


@dataclass(slots=True)
class Fault:
    t: float
    """Of its event. Unix seconds."""
    name: str
    """Worker id, controller id or "redis"."""
    host: str
    """Empty: not known."""
    pid: int
    cause: FaultCause
    incarnation: int = 0
    """0: of no worker, or the worker has not died of it."""
    lost_s: float = 0.0
    """Training time that it has cost so far."""
    recovered_s: float = -1.0
    """From its event until commits came at the usual pace again; -1: not yet."""


@dataclass(slots=True)
class Faults:
    recent: list[Fault] = field(default_factory=list)
    """Oldest first."""
    by_cause: dict[str, int] = field(default_factory=dict)
    lost_by_cause: dict[str, float] = field(default_factory=dict)
    """Seconds."""
    by_host: dict[str, int] = field(default_factory=dict)
    blamed: dict[str, float] = field(default_factory=dict)
    """Suspected hosts, and when each was named last. Unix seconds."""
    intervals: list[float] = field(default_factory=list)
    """Between the last commits at the usual pace, in seconds."""
    commit_t: float = 0.0
    """Of the newest commit; 0: the next interval is not counted."""
    calm: int = 0
    """Commits in a row at the usual pace."""
    calm_t: float = 0.0
    """When the first of their intervals began."""
    elapsed_s: float = 0.0
    lost_s: float = 0.0
    """Of ``elapsed_s``: above the usual pace, faults or not."""

    @property
    def count(self) -> int:
        return sum(self.by_cause.values())

    @property
    def attributed(self) -> int:
        """Faults with a known cause."""
        return sum(n for cause, n in self.by_cause.items() if cause in ATTRIBUTED)

    @property
    def training_share(self) -> float | None:
        """Of the time between commits; None before the second commit."""
        return 1.0 - self.lost_s / self.elapsed_s if self.elapsed_s > 0 else None

    def add(self, fault: Fault) -> None:
        """A word about a process, of which a recent one may already be known: then only the cause
        is new."""
        before = self.last_of(fault.name, fault.t)
        if before is not None and self._same(before, fault):
            self._rename(before, fault.cause)
            if not before.host:
                before.host = fault.host
                self._count_host(fault.host)
            before.pid = fault.pid or before.pid
            before.incarnation = fault.incarnation or before.incarnation
            return
        self.recent.append(fault)
        del self.recent[:-KEPT]
        self._count(fault.cause, 1)
        self._count_host(fault.host)
        self.calm = 0

    @staticmethod
    def _same(before: Fault, fault: Fault) -> bool:
        """A process that is stopped dies of its lease; a leader that was killed is succeeded at
        once."""
        if before.pid and fault.pid and before.pid != fault.pid:
            return False
        if fault.incarnation and not before.incarnation and before.cause != FaultCause.STOPPED:
            return bool(before.pid)  # it had ended when its registration came
        if before.cause not in ATTRIBUTED:
            return True
        if before.cause == FaultCause.LATE and fault.cause == FaultCause.STOPPED:
            return True  # it has taken its stop for a slow machine, and its launcher knows better
        return before.cause == fault.cause == FaultCause.STOPPED and fault.incarnation > 0

    def last_of(self, name: str, now: float) -> Fault | None:
        """The newest fault of the process of that name, if it is recent."""
        for fault in reversed(self.recent):
            if now - fault.t > SAME_S:
                return None
            if fault.name == name:
                return fault
        return None

    def of_process(self, name: str, host: str, pid: int) -> Fault | None:
        """The newest fault of that very process."""
        for fault in reversed(self.recent):
            if (fault.name, fault.host, fault.pid) == (name, host, pid):
                return fault
        return None

    def fail_over(self, t: float, leader: str) -> None:
        """Another controller leads than ``leader``. Its launcher may tell why, before or after."""
        if self.last_of(leader, t) is None:
            self.add(Fault(t, leader, "", 0, FaultCause.UNATTRIBUTED))

    def explain(self, name: str, incarnation: int, cause: FaultCause) -> None:
        """Later evidence about the death of a worker."""
        for fault in reversed(self.recent):
            if (fault.name, fault.incarnation) == (name, incarnation):
                self._rename(fault, cause)
                return

    def _rename(self, fault: Fault, cause: FaultCause) -> None:
        if cause not in ATTRIBUTED or cause == fault.cause:
            return
        self._count(fault.cause, -1)
        self._count(cause, 1)
        self._lose(fault.cause, -fault.lost_s)
        self._lose(cause, fault.lost_s)
        fault.cause = cause

    def _count(self, cause: FaultCause, by: int) -> None:
        self.by_cause[cause] = self.by_cause.get(cause, 0) + by
        if not self.by_cause[cause]:
            del self.by_cause[cause]

    def _count_host(self, host: str) -> None:
        if host and (host in self.by_host or len(self.by_host) < HOSTS_KEPT):
            self.by_host[host] = self.by_host.get(host, 0) + 1

    def _lose(self, cause: FaultCause, seconds: float) -> None:
        if seconds:
            self.lost_by_cause[cause] = max(0.0, self.lost_by_cause.get(cause, 0.0) + seconds)

    # ---- the pace -------------------------------------------------------------------------

    def resume(self) -> None:
        """The run begins, or goes on after a stop."""
        self.commit_t = 0.0

    def commit(self, t: float) -> None:
        began, self.commit_t = self.commit_t, t
        if not began or t <= began:
            return
        took_s = t - began
        self.elapsed_s += took_s
        usual_s = self.usual_s
        if usual_s and took_s > LATE * usual_s + LATE_S:
            self.calm = 0
            self._share_loss(took_s - usual_s)
            return
        if not self.calm:
            self.calm_t = began
        self.calm += 1
        self.intervals.append(took_s)
        del self.intervals[:-PACE]
        if self.calm >= CALM:
            for fault in self._open():
                fault.recovered_s = max(0.0, self.calm_t - fault.t)

    @property
    def usual_s(self) -> float:
        """Median time between commits; 0: not known yet."""
        ranked = sorted(self.intervals)
        return ranked[len(ranked) // 2] if len(ranked) >= PACE_LEAST else 0.0

    def lose_steps(self, steps: int) -> None:
        """A rollback has undone them."""
        self._share_loss(min(steps * self.usual_s, self.elapsed_s - self.lost_s))

    def _share_loss(self, seconds: float) -> None:
        self.lost_s += seconds
        open_ = self._open()
        for fault in open_:
            fault.lost_s += seconds / len(open_)
            self._lose(fault.cause, seconds / len(open_))

    def _open(self) -> list[Fault]:
        return [fault for fault in self.recent if fault.recovered_s < 0]
