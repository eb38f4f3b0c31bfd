"""Report of a run's faults: causes, hosts, time lost, and the share of the time spent training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from controller.ledger.enums import ATTRIBUTED
from controller.ledger.state.faults import Faults

SHOWN = 100


@dataclass(frozen=True, slots=True)
class CauseTotal:
    faults: int
    lost_s: float
    """Training time that they have cost, in seconds."""


@dataclass(frozen=True, slots=True)
class OneFault:
    t: float
    """Unix seconds."""
    name: str
    """Worker id, controller id or "redis"."""
    host: str
    """Empty: not known."""
    pid: int
    """0: not known."""
    cause: str
    attributed: bool
    """The cause is known, and not only a symptom."""
    lost_s: float
    """Training time that it has cost so far, in seconds."""
    recovered_s: float | None
    """Seconds until commits came at the usual pace again; null: not yet."""


@dataclass(frozen=True, slots=True)
class FaultReport:
    faults: int
    attributed: int
    """Those with a known cause."""
    attributed_share: float | None
    """Null without a fault."""
    causes: dict[str, CauseTotal]
    hosts: dict[str, int]
    """Faults by host."""
    suspected_hosts: list[str]
    lost_s: float
    """Time between commits above the usual pace, faults or not, in seconds."""
    training_share: float | None
    """Of the time between commits; null before the second."""
    recent: list[OneFault]
    """Newest last."""

    @property
    def sentence(self) -> str:
        """ "3 faults so far, 3 with a known cause (killed 2, stopped 1), cost 4.1 s; ..."; empty
        without any."""
        if not self.faults:
            return ""
        causes = ", ".join(f"{c.replace('_', ' ')} {t.faults}" for c, t in self.causes.items())
        lost_s = sum(t.lost_s for t in self.causes.values())
        text = (
            f"{self.faults} fault{'s' if self.faults > 1 else ''} so far, {self.attributed} with a "
            f"known cause ({causes}), cost {lost_s:.1f} s of training"
        )
        if self.training_share is not None:
            text += f"; {self.training_share:.1%} of the time was spent training"
        for host in self.suspected_hosts:
            text += f"; host {host} is suspected ({self.hosts.get(host, 0)} faults)"
        return text

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def fault_report(faults: Faults) -> FaultReport:
    count, attributed = faults.count, faults.attributed
    ranked = sorted(faults.by_cause.items(), key=lambda item: (-item[1], item[0]))
    share = faults.training_share
    return FaultReport(
        faults=count,
        attributed=attributed,
        attributed_share=attributed / count if count else None,
        causes={
            str(c): CauseTotal(n, round(faults.lost_by_cause.get(c, 0.0), 3)) for c, n in ranked
        },
        hosts=dict(faults.by_host),
        suspected_hosts=list(faults.blamed),
        lost_s=round(faults.lost_s, 3),
        training_share=None if share is None else round(share, 6),
        recent=[
            OneFault(
                fault.t,
                fault.name,
                fault.host,
                fault.pid,
                str(fault.cause),
                fault.cause in ATTRIBUTED,
                round(fault.lost_s, 3),
                round(fault.recovered_s, 3) if fault.recovered_s >= 0 else None,
            )
            for fault in faults.recent[-SHOWN:]
        ],
    )
