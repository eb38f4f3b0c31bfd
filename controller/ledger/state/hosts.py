"""Hosts: faults of workers that evidence puts on their host, and hosts that get no new work."""

import math
from dataclasses import dataclass, field

SAME_S = 60.0
"""Faults of one host within this time are one: a host that is lost takes all its workers along."""
FAULTS_KEPT = 64
HOSTS_KEPT = 1024


@dataclass(slots=True)
class Host:
    faults: dict[str, float] = field(default_factory=dict)
    """Time of each of its newest faults, oldest first, by the process that had it. Unix seconds."""
    blocked: str = ""  # Why its workers get no new work; empty: they get some
    excused: bool = False
    """The leader blocked it, and later evidence took a fault from it."""
    by_leader: bool = False
    kept: bool = False  # It has too many faults and still works, and people were told

    def incidents(self, since: float) -> int:
        count, began = 0, -math.inf
        for t in sorted(t for t in self.faults.values() if t >= since):
            # From the first one on: a worker that crashes every half minute has one fault a minute.
            if t - began > SAME_S:
                count, began = count + 1, t
        return count


@dataclass(slots=True)
class Hosts:
    by_name: dict[str, Host] = field(default_factory=dict)

    def blame(self, name: str, fault: str, t: float) -> None:
        """A fault counts once, however often it is reported."""
        if not name:
            return
        host = self.by_name.setdefault(name, Host())
        host.faults.setdefault(fault, t)
        for oldest in list(host.faults)[:-FAULTS_KEPT]:
            del host.faults[oldest]
        if len(self.by_name) > HOSTS_KEPT:
            del self.by_name[next(n for n, h in self.by_name.items() if not h.blocked)]

    def excuse(self, name: str, fault: str) -> None:
        """Better evidence says that the fault was not the host's."""
        host = self.by_name.get(name)
        if host is not None and host.faults.pop(fault, None) is not None:
            host.excused = host.by_leader

    def block(self, name: str, why: str, *, by_leader: bool) -> None:
        host = self.by_name.setdefault(name, Host())
        host.blocked, host.by_leader, host.excused = why, by_leader, False

    def unblock(self, name: str) -> None:
        if name in self.by_name:
            self.block(name, "", by_leader=False)

    def blocks(self, name: str) -> bool:
        host = self.by_name.get(name)
        return host is not None and bool(host.blocked)
