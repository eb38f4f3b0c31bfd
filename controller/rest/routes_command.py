"""Command routes of the REST interface. A standby redirects the caller to the leader."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import RedirectResponse, Response

from controller.errors import NotLeading
from controller.ledger.commands import (
    Command,
    CommandRefused,
    Drain,
    Pause,
    RequestCheckpoint,
    Scale,
    Stop,
)
from controller.rest import schemas
from controller.rest.controller_addresses import leader_url
from controller.rest.problem_details import Problem, documented
from controller.store.journal import Deposed

if TYPE_CHECKING:
    from controller.replicated_controller import Controller

PATIENCE_S = 10.0
REFUSALS = {"unknown": 404, "invalid": 422}


def router(controller: Controller) -> APIRouter:
    routes = APIRouter(
        prefix="/api/v1",
        tags=["steering"],
        responses={
            307: {"description": "Repeat the request there: that controller leads"},
            **documented(400, 401, 403, 409, 411, 413, 422, 429, 500, 503),
        },
    )

    async def decide(request: Request, command: Command) -> Response | schemas.Done:
        try:
            async with asyncio.timeout(PATIENCE_S):
                reply = await controller.leading().execute(command)
        except CommandRefused as refusal:
            raise Problem(REFUSALS.get(refusal.code, 409), str(refusal)) from refusal
        except (NotLeading, Deposed, TimeoutError):
            url = leader_url(controller)
            if not url or url == controller.rest_url:
                raise Problem(
                    503, "no controller leads at the moment: retry", {"Retry-After": "1"}
                ) from None
            return RedirectResponse(url + request.scope["path"], 307)
        return schemas.Done(accepted=True, message=str(reply or ""))

    @routes.post(
        "/scale", summary="Change the desired number of workers", response_model=schemas.Done
    )
    async def scale(request: Request, body: schemas.ScaleBody) -> Response | schemas.Done:
        desired = body.model_dump(include={"policy", "rollout"}, exclude_none=True)
        expected = body.expected.model_dump(exclude_none=True) if body.expected else {}
        return await decide(request, Scale(_id(body), desired, expected))

    @routes.post(
        "/workers/{worker_id}/drain",
        summary="Drain a worker: it finishes its tasks and leaves",
        response_model=schemas.Done,
        responses=documented(404),
    )
    async def drain(
        request: Request,
        worker_id: Annotated[str, Path(max_length=64)],
        body: schemas.DrainBody | None = None,
    ) -> Response | schemas.Done:
        replace = body is not None and body.replace
        incarnation = int(body.incarnation or 0) if body is not None else 0
        return await decide(request, Drain(_id(body), worker_id, replace, incarnation))

    @routes.post("/pause", summary="Pause the run", response_model=schemas.Done)
    async def pause(
        request: Request, body: schemas.RequestBody | None = None
    ) -> Response | schemas.Done:
        return await decide(request, Pause(_id(body), True))

    @routes.post("/resume", summary="Resume the run", response_model=schemas.Done)
    async def resume(
        request: Request, body: schemas.RequestBody | None = None
    ) -> Response | schemas.Done:
        return await decide(request, Pause(_id(body), False))

    @routes.post(
        "/checkpoint", summary="Write a checkpoint after the next step", response_model=schemas.Done
    )
    async def checkpoint(
        request: Request, body: schemas.RequestBody | None = None
    ) -> Response | schemas.Done:
        return await decide(request, RequestCheckpoint(_id(body)))

    @routes.post("/stop", summary="End the run for good", response_model=schemas.Done)
    async def stop(
        request: Request, body: schemas.StopBody | None = None
    ) -> Response | schemas.Done:
        reason = body.reason if body is not None else ""
        return await decide(request, Stop(_id(body), reason or "stopped by request"))

    return routes


def _id(body: schemas.RequestBody | None) -> str:
    given = body.request_id if body is not None else ""
    return given or f"rest-{secrets.token_hex(12)}"
