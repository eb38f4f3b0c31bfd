"""Diagnosis over REST: what the run waits for and because of whom, and what its faults were and
cost."""

from __future__ import annotations

from fastapi import APIRouter

from controller.diagnosis.collect import why_of
from controller.replicated_controller import Controller
from controller.rest.problem_details import documented
from controller.rest.schemas import Reply
from paceline.observe.faults import FaultReport
from paceline.observe.redaction import Redactor
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


def router(controller: Controller) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", responses=documented(401, 403, 429, 500))
    redactor = Redactor(controller.run_dir)

    @routes.get("/why", summary="What the run waits for, and because of whom", tags=["run"])
    async def why() -> WhyReply:
        await controller.context.projector.look()
        found = why_of(controller)
        shown = redactor.value(as_dict(found))
        return WhyReply.model_validate({**shown, "since_s": round(found.since_s, 3)})

    @routes.get("/faults", summary="Faults so far: causes, hosts, time lost", tags=["run"])
    async def faults() -> FaultReport:
        return await controller.context.projector.ask(lambda run: run.totals.faults.report())

    return routes
