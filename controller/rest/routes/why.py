"""Diagnosis over REST: what the run waits for and because of whom, and what its faults were and
cost."""

from __future__ import annotations

from fastapi import APIRouter

from controller.diagnosis.collect import why_of
from controller.ledger.views.fault_report import fault_report
from controller.replicated_controller import Controller
from controller.rest.problem_details import documented
from controller.rest.redaction import Redactor
from controller.rest.schemas import Reply
from paceline.rpc.messages import as_dict


class CulpritReply(Reply):
    """What the run waits for."""

    kind: str
    """worker, starting_worker, controller, redis, dataset, hub, model, reward, environment,
    checkpoint, network, user or none."""
    name: str
    host: str
    pid: int
    """0: it is no process."""


class WhyReply(Reply):
    sentence: str
    """The whole diagnosis, without the remedy."""
    subject: str
    """What waits."""
    since_s: float
    culprit: CulpritReply
    because: str
    next: str
    """What happens if nobody does anything."""
    remedy: str
    """Empty: nothing is needed."""
    severity: str
    """ok, slow or stuck."""
    controller_id: str
    """The controller that answers."""
    leads: bool
    """A standby sees no heartbeats."""
    bottleneck: str
    """What a run that makes progress would be faster without: trainers, generation, rewards,
    staleness, controller, weights or none. Empty: not known."""
    pace: str
    """The same in a sentence, with the remedy."""
    faults: str
    """Faults so far, their causes, what they cost, and a suspected host. Empty: there were none."""


class CauseTotalReply(Reply):
    faults: int
    lost_s: float
    """Training time that they have cost, in seconds."""


class OneFaultReply(Reply):
    t: float
    """Unix seconds."""
    name: str
    """Worker id, controller id or redis."""
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


class FaultsReply(Reply):
    faults: int
    attributed: int
    """Those with a known cause."""
    attributed_share: float | None
    """Null without a fault."""
    causes: dict[str, CauseTotalReply]
    """By cause, the most frequent first."""
    hosts: dict[str, int]
    """Faults by host."""
    suspected_hosts: list[str]
    """Hosts of which several processes have failed."""
    lost_s: float
    """Time between commits above the usual pace, faults or not, in seconds."""
    training_share: float | None
    """Of the time between commits; null before the second."""
    recent: list[OneFaultReply]
    """Newest last."""
    sentence: str
    """The report in words; empty without a fault."""


def router(controller: Controller) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", responses=documented(401, 403, 429, 500))
    redactor = Redactor(controller.run_dir)

    @routes.get("/why", summary="What the run waits for, and because of whom", tags=["run"])
    async def why() -> WhyReply:
        found = why_of(controller)
        shown = redactor.value(as_dict(found))
        return WhyReply.model_validate({**shown, "since_s": round(found.since_s, 3)})

    @routes.get("/faults", summary="Faults so far: causes, hosts, time lost", tags=["run"])
    async def faults() -> FaultsReply:
        report = fault_report(controller.state.faults)
        shown = {**report.to_json(), "sentence": report.sentence}
        return FaultsReply.model_validate(shown)

    return routes
