"""Command routes of the REST interface: requests of AdminService as JSON, answered by its handlers.
A standby redirects the caller to the leader."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, FastAPI, Request
from google.protobuf.json_format import ParseDict, ParseError
from starlette.responses import RedirectResponse, Response

from controller.ledger.decisions.commands import CommandRefused
from controller.replicated_controller import Controller
from controller.rest.auth import PROVEN
from controller.rest.schemas import Problem, respond
from controller.runtime import NotLeading
from controller.services import admin
from controller.store.journal import Deposed
from paceline.payloads.group_limits import Invalid
from paceline.rpc.grpc_channel import as_dict
from paceline.v1 import admin_pb2

PATIENCE_S = 10.0
REFUSALS = {"unknown": 404, "invalid": 422}
Handler = Callable[[Controller, Any], Awaitable[Any]]
COMMANDS: dict[str, tuple[Handler, Any, str]] = {
    "scale": (admin.scale, admin_pb2.ScaleRequest(), "Change the desired number of workers"),
    "drain": (admin.drain, admin_pb2.DrainRequest(), "Let a worker finish its tasks and leave"),
    "settings": (admin.change_settings, admin_pb2.SettingsRequest(), "Change settings of the run"),
    "pause": (admin.pause, admin_pb2.PauseRequest(paused=True), "Pause the run"),
    "resume": (admin.pause, admin_pb2.PauseRequest(paused=False), "Resume the run"),
    "checkpoint": (
        *(admin.save_checkpoint, admin_pb2.SaveCheckpointRequest()),
        "Write a checkpoint after the next step",
    ),
    "stop": (admin.stop, admin_pb2.StopRequest(), "End the run for good"),
}
"""By path: the handler, what the request says already, and a summary."""


def install(app: FastAPI, controller: Controller) -> None:
    redirect = {"description": "Another controller leads: Location has its URL"}
    routes = APIRouter(prefix="/api/v1", tags=["steering"], responses={307: redirect})
    for path, (handler, begun, summary) in COMMANDS.items():
        command = _command(controller, handler, begun)
        routes.add_api_route(f"/{path}", command, methods=["POST"], summary=summary, name=path)
    app.include_router(routes)

    @app.exception_handler(CommandRefused)
    async def refused(request: Request, error: CommandRefused) -> Response:
        return respond(REFUSALS.get(error.code, 409), str(error), request.url.path)

    @app.exception_handler(Invalid)
    async def invalid(request: Request, error: Invalid) -> Response:
        return respond(422, str(error), request.url.path)

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


def _command(
    controller: Controller, handler: Handler, begun: Any
) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Route of a command; ``begun``: the request without what the body says."""
    name = begun.DESCRIPTOR.name
    told = Body(description=f"Fields of {name} in proto/paceline/v1/admin.proto, as JSON.")

    async def command(
        key: Annotated[str, Depends(idempotency_key)],
        body: Annotated[dict[str, Any] | None, told] = None,
    ) -> dict[str, Any]:
        controller.leading()
        given = {**(body or {}), "request_id": (body or {}).get("request_id") or key}
        given.pop("paused", None)  # the path says it
        if isinstance(settings := given.get("settings"), dict):
            given["settings"] = {name: json.dumps(value) for name, value in settings.items()}
        request = type(begun).FromString(begun.SerializeToString())
        try:
            ParseDict(given, request)
        except ParseError as error:
            raise Problem(422, f"{name}: {error}") from None
        try:
            async with asyncio.timeout(PATIENCE_S):
                return as_dict(await handler(controller, request))
        except (Deposed, TimeoutError) as error:
            raise NotLeading("this term is over or does not commit") from error

    return command
