"""Command routes of the REST interface. A standby redirects the caller to the leader."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Path, Request
from starlette.responses import RedirectResponse, Response

from controller.ledger import decisions as cmd
from controller.replicated_controller import Controller
from controller.rest import schemas
from controller.rest.auth import PROVEN
from controller.rest.schemas import respond
from controller.runtime import NotLeading
from controller.store.journal import Deposed
from paceline.providers.base import who_scales

PATIENCE_S = 10.0
REFUSALS = {"unknown": 404, "invalid": 422}


def install(app: FastAPI, controller: Controller) -> None:
    app.include_router(router(controller))

    @app.exception_handler(cmd.CommandRefused)
    async def refused(request: Request, error: cmd.CommandRefused) -> Response:
        return respond(REFUSALS.get(error.code, 409), str(error), request.url.path)

    @app.exception_handler(NotLeading)
    async def redirected(request: Request, error: NotLeading) -> Response:
        path, url = request.url.path, leader_url(controller)
        if url and url != controller.rest_url:
            return RedirectResponse(url + path, 307)
        detail = "no controller leads at the moment: retry"
        return respond(503, detail, path, {"Retry-After": "1"})


def leader_url(controller: Controller) -> str:
    """REST URL of the leader; empty if there is no leader or if it serves no REST interface."""
    if controller.leader is not None:
        return controller.rest_url
    for peer in controller.peers.values():
        if controller.hint and peer["address"] == controller.hint:
            return str(peer.get("rest") or "")
    return ""


def idempotency_key(request: Request) -> str:
    """The key of a request whose body has no ``request_id``. One that is repeated by whoever heard
    it at a port that changed hands has the nonce of the same proof, and so no second effect."""
    proven = request.scope.get("state", {}).get(PROVEN)
    return f"rest-{(proven.nonce if proven else '') or secrets.token_hex(12)}"


Key = Annotated[str, Depends(idempotency_key)]


def router(controller: Controller) -> APIRouter:
    redirect = {"description": "Another controller leads: Location has its URL"}
    routes = APIRouter(prefix="/api/v1", tags=["steering"], responses={307: redirect})

    @asynccontextmanager
    async def patience() -> AsyncIterator[None]:
        """Raises NotLeading if the body takes too long, or ends with the term."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield
        except (Deposed, TimeoutError) as error:
            raise NotLeading("this term is over or does not commit") from error

    async def decide(command: cmd.Command[str]) -> schemas.Done:
        """Raises CommandRefused and NotLeading."""
        async with patience():
            reply = await controller.leading().execute(command)
        return schemas.Done(accepted=True, message=str(reply or ""))

    @routes.post("/scale", summary="Change the desired number of workers")
    async def scale(body: schemas.ScaleBody, key: Key) -> schemas.Done:
        expected = body.expected.by_pool if body.expected else {}
        done = await decide(cmd.scale(_id(body, key), body.by_pool, expected))
        who = who_scales(controller.config.fleet.provider, controller.run_dir)
        return done.model_copy(update={"message": f"{done.message}; {who}"})

    @routes.post("/workers/{worker_id}/drain", summary="Let a worker finish its tasks and leave")
    async def drain(
        worker_id: Annotated[str, Path(max_length=64)],
        key: Key,
        body: schemas.DrainBody | None = None,
    ) -> schemas.Done:
        body = body or schemas.DrainBody()
        return await decide(
            cmd.drain(_id(body, key), worker_id, body.replace, int(body.incarnation or 0))
        )

    @routes.post("/settings", summary="Change settings of the run while it runs")
    async def settings(body: schemas.SettingsBody, key: Key) -> schemas.SettingsDone:
        async with patience():
            message, changes = await controller.set_settings(
                _id(body, key), body.settings, dry_run=body.dry_run
            )
        return schemas.SettingsDone(accepted=True, message=message, changes=changes)

    @routes.post("/pause", summary="Pause the run")
    async def pause(key: Key, body: schemas.RequestBody | None = None) -> schemas.Done:
        return await decide(cmd.pause(_id(body, key), True))

    @routes.post("/resume", summary="Resume the run")
    async def resume(key: Key, body: schemas.RequestBody | None = None) -> schemas.Done:
        return await decide(cmd.pause(_id(body, key), False))

    @routes.post("/checkpoint", summary="Write a checkpoint after the next step")
    async def checkpoint(key: Key, body: schemas.RequestBody | None = None) -> schemas.Done:
        return await decide(cmd.request_checkpoint(_id(body, key)))

    @routes.post("/stop", summary="End the run for good")
    async def stop(key: Key, body: schemas.StopBody | None = None) -> schemas.Done:
        body = body or schemas.StopBody()
        return await decide(cmd.stop(_id(body, key), body.reason or "stopped by request"))

    return routes


def _id(body: schemas.RequestBody | None, key: str) -> str:
    return (body.request_id if body else "") or key
