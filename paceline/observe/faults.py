"""Faults of a run: their causes and hosts, the time that each has cost, and the share of time spent
training.

    fault ──► commits come late ──► two commits in a row at the usual pace: the fault is over

- The usual pace is the median time between the last commits. An interval that is half as long again
  is late; what it has more than usual is lost.
- A loss is shared by the faults that are open in the interval. Steps that a rollback undoes are
  lost too.
- An interval in which the run was stopped, or had no commit before it, counts for nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import plural
from paceline.observe.vocabulary import ATTRIBUTED, NO_FAULT, EventType, FaultCause

KEPT = 256  # Newest faults that are kept one by one
HOSTS_KEPT = 1024
PROCESSES_KEPT = 4096
PACE = 31  # Commits whose intervals make the usual pace
PACE_LEAST = 5
LATE = 1.5
LATE_S = 0.1  # Below it a late commit is jitter
CALM = 2  # Commits in a row at the usual pace after which a fault is over
SAME_S = 30.0  # Two reports about one process within it are about the same fault
SHOWN = 100


@dataclass(slots=True)
class Fault:
    t: float  # Time of its event. Unix seconds.
    name: str  # Worker id, controller id or "redis"
    host: str  # Empty: not known
    pid: int
    cause: FaultCause
    incarnation: int = 0  # 0: it is no worker's, or the worker has not died of it
    lost_s: float = 0.0  # Training time that it has cost so far
    recovered_s: float = -1.0
    """From its event until commits came at the usual pace again; -1: not yet."""

    def to_json(self) -> dict[str, Any]:
        names = ("t", "name", "host", "pid", "cause")
        return {name: getattr(self, name) for name in names} | {
            "attributed": self.cause in ATTRIBUTED,
            "lost_s": round(self.lost_s, 3),
            "recovered_s": round(self.recovered_s, 3) if self.recovered_s >= 0 else None,
        }


@dataclass(slots=True)
class Faults:
    """All faults of a run, with what they have cost, from its listed events."""

    recent: list[Fault] = field(default_factory=list)
    """The newest ones, oldest first, each process's once, with the best evidence of its cause."""
    by_cause: dict[str, int] = field(default_factory=dict)
    lost_by_cause: dict[str, float] = field(default_factory=dict)  # Seconds
    by_host: dict[str, int] = field(default_factory=dict)
    intervals: list[float] = field(default_factory=list)
    """Between the last commits at the usual pace, in seconds."""
    commit_t: float = 0.0  # Time of the newest commit; 0: the next interval is not counted
    calm: int = 0  # Commits in a row at the usual pace
    calm_t: float = 0.0  # When the first of their intervals began
    elapsed_s: float = 0.0
    lost_s: float = 0.0  # Part of ``elapsed_s`` above the usual pace, faults or not
    leader: str = ""
    processes: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Process id and host of the newest process of each worker id."""

    def take(self, kind: str, event: Mapping[str, Any]) -> None:
        if kind == EventType.STEP_COMMITTED:
            self._commit(float(event["t"]))
        elif kind == EventType.WORKER_REGISTERED:
            self.processes.pop(event["worker_id"], None)
            self.processes[event["worker_id"]] = event["pid"], event["host"]
            if len(self.processes) > PROCESSES_KEPT:
                del self.processes[next(iter(self.processes))]
        elif kind == EventType.WORKER_DIED:
            self._died(event)
        elif kind == EventType.PROCESS_FAULT:
            self._process_fault(event)
        elif kind == EventType.FAULT_EXPLAINED:
            for fault in reversed(self.recent):
                if (fault.name, fault.incarnation) == (event["worker_id"], event["incarnation"]):
                    self._rename(fault, FaultCause(event["cause"]))
                    break
        elif kind == EventType.TERM_BEGUN:
            t = float(event["t"])
            if not event.get("failover"):
                self.commit_t = 0.0
            elif self._last_of(self.leader, t) is None:
                # Its launcher may tell why, before or after.
                self.add(Fault(t, self.leader, "", 0, FaultCause.UNATTRIBUTED))
            self.leader = str(event.get("controller_id") or "")
        elif kind == EventType.RUN_CONTINUED:
            self.commit_t = 0.0
        elif kind == EventType.ROLLED_BACK:
            undone = int(event.get("from_step") or 0) - int(event["step"])
            self._share_loss(max(0.0, min(undone * self.usual_s, self.elapsed_s - self.lost_s)))

    def _died(self, event: Mapping[str, Any]) -> None:
        t, cause = float(event["t"]), FaultCause(event["cause"])
        if cause in NO_FAULT:
            return
        worker_id = event["worker_id"]
        pid, host = self.processes.get(worker_id, (0, ""))
        host = event.get("host") or host
        self.add(Fault(t, worker_id, host, pid, cause, event["incarnation"]))

    def _process_fault(self, event: Mapping[str, Any]) -> None:
        t, cause = float(event["t"]), FaultCause(event["cause"])
        name, host, pid = event["name"], event["host"], event["pid"]
        if cause in NO_FAULT:
            return
        of_it = [f for f in self.recent if (f.name, f.host, f.pid) == (name, host, pid)]
        if event.get("over") and of_it:
            # The end of a process whose fault is known is no second one.
            if of_it[-1].cause not in ATTRIBUTED:
                self._rename(of_it[-1], cause)
            return
        self.add(Fault(t, name, host, pid, cause))

    def add(self, fault: Fault) -> None:
        """Takes a report about a process; of a recent fault of it only the cause is new."""
        before = self._last_of(fault.name, fault.t)
        if before is not None and self._same(before, fault):
            self._rename(before, fault.cause)
            if not before.host:
                before.host = fault.host
                self._host_found(fault.host)
            before.pid = fault.pid or before.pid
            before.incarnation = fault.incarnation or before.incarnation
            return
        self.recent.append(fault)
        del self.recent[:-KEPT]
        self._count(fault.cause, 1)
        self._host_found(fault.host)
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
        return before.cause == fault.cause == FaultCause.STOPPED and fault.incarnation > 0

    def _last_of(self, name: str, now: float) -> Fault | None:
        """The newest fault of the process of that name, if it is recent."""
        for fault in reversed(self.recent):
            if now - fault.t > SAME_S:
                return None
            if fault.name == name:
                return fault
        return None

    def _rename(self, fault: Fault, cause: FaultCause) -> None:
        if cause not in ATTRIBUTED or cause == fault.cause:
            return
        before, fault.cause = fault.cause, cause
        self._count(before, -1)
        self._count(cause, 1)
        self._lose(before, -fault.lost_s)
        self._lose(cause, fault.lost_s)

    @property
    def count(self) -> int:
        return sum(self.by_cause.values())

    @property
    def attributed(self) -> int:
        """Number of faults with a known cause."""
        return sum(n for cause, n in self.by_cause.items() if cause in ATTRIBUTED)

    @property
    def training_share(self) -> float | None:
        """Share of the time between commits; None before the second commit."""
        return 1.0 - self.lost_s / self.elapsed_s if self.elapsed_s > 0 else None

    @property
    def usual_s(self) -> float:
        """Median time between commits; 0: not known yet."""
        ranked = sorted(self.intervals)
        return ranked[len(ranked) // 2] if len(ranked) >= PACE_LEAST else 0.0

    def _count(self, cause: FaultCause, by: int) -> None:
        self.by_cause[cause] = self.by_cause.get(cause, 0) + by
        if not self.by_cause[cause]:
            del self.by_cause[cause]

    def _host_found(self, host: str) -> None:
        if host and (host in self.by_host or len(self.by_host) < HOSTS_KEPT):
            self.by_host[host] = self.by_host.get(host, 0) + 1

    def _lose(self, cause: FaultCause, seconds: float) -> None:
        if seconds:
            self.lost_by_cause[cause] = max(0.0, self.lost_by_cause.get(cause, 0.0) + seconds)

    def _commit(self, t: float) -> None:
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

    def _share_loss(self, seconds: float) -> None:
        self.lost_s += seconds
        open_ = self._open()
        for fault in open_:
            fault.lost_s += seconds / len(open_)
            self._lose(fault.cause, seconds / len(open_))

    def _open(self) -> list[Fault]:
        return [fault for fault in self.recent if fault.recovered_s < 0]

    def report(self) -> dict[str, Any]:
        """All faults as JSON: their causes, the most frequent first, and hosts, the time that they
        have cost, the share of time spent training (null before the second commit), and the newest
        ones, newest last. docs/diagnosis.md has the meaning of causes and times."""
        share = self.training_share
        return {
            "faults": self.count,
            "attributed": self.attributed,  # with a known cause
            "attributed_share": self.attributed / self.count if self.count else None,
            "causes": {
                str(c): {"faults": n, "lost_s": round(self.lost_by_cause.get(c, 0.0), 3)}
                for c, n in self._ranked()
            },
            "hosts": dict(self.by_host),
            # Time between commits above the usual pace, faults or not.
            "lost_s": round(self.lost_s, 3),
            "training_share": None if share is None else round(share, 6),
            "recent": [fault.to_json() for fault in self.recent[-SHOWN:]],
            "sentence": self.sentence,
        }

    @property
    def sentence(self) -> str:
        """ "3 faults so far, 3 with a known cause (killed 2, stopped 1), cost 4.1 s; ..."; empty
        without any."""
        if not self.count:
            return ""
        causes = ", ".join(f"{c.replace('_', ' ')} {n}" for c, n in self._ranked())
        lost_s = sum(round(self.lost_by_cause.get(c, 0.0), 3) for c in self.by_cause)
        text = (
            f"{plural(self.count, 'fault')} so far, {self.attributed} with a "
            f"known cause ({causes}), cost {lost_s:.1f} s of training"
        )
        if self.training_share is not None:
            text += f"; {self.training_share:.1%} of the time was spent training"
        return text

    def _ranked(self) -> list[tuple[str, int]]:
        """Causes with their number of faults, the most frequent first."""
        return sorted(self.by_cause.items(), key=lambda item: (-item[1], item[0]))
