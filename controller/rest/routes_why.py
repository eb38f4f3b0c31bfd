"""Diagnosis over REST: what the run waits for, whose fault it is, what happens next, and the remedy."""

from __future__ import annotations

from fastapi import APIRouter

from controller.diagnosis.collect import diagnosis_of, why_reply
from controller.replicated_controller import Controller
from controller.rest.data_flow import bottleneck
from controller.rest.problem_details import documented
from controller.rest.redaction import Redactor
from controller.rest.schemas import Reply
from controller.rest.step_rate import StepRate
from paceline.rpc.messages import as_dict


class CulpritReply(Reply):
    """What the run waits for."""

    kind: str
    """worker, starting_worker, controller, redis, dataset, hub, model, reward, environment, checkpoint,
    network, user or none."""
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


def router(controller: Controller, rate: StepRate) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", responses=documented(401, 403, 429, 500))
    redactor = Redactor(controller.run_dir)

    @routes.get("/why", summary="What the run waits for, and because of whom", tags=["run"])
    async def why() -> WhyReply:
        await rate.refresh()
        found = diagnosis_of(controller, bottleneck(controller, rate.stalled_s))
        shown = redactor.value(as_dict(why_reply(controller, found)))
        return WhyReply.model_validate({**shown, "since_s": round(found.since_s, 3)})

    return routes
