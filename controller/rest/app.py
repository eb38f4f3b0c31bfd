"""The application: REST under /api/v1, probes, Prometheus, and the dashboard's page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from controller.rest import problem_details, routes_command, routes_query, schemas, sse
from controller.rest.auth import OPEN_PATHS, RestAuth
from controller.rest.controller_addresses import other_urls
from controller.rest.eta import StepRate
from controller.rest.examples import add_examples
from controller.rest.problem_details import Problem, documented
from controller.rest.prometheus import PrometheusMetrics
from controller.rest.run_index import RunIndex
from controller.rest.sse import EventStreams

if TYPE_CHECKING:
    from controller.replicated_controller import Controller

STATIC = Path(__file__).parent / "static"
ABOUT = """What a run does, whether it learns, where its time goes, what has failed; and steering it.

Every controller answers reads. Writes need the run's token and are decided by the leader: a standby
answers 307 with the leader's URL. Errors are RFC 9457 problem details.
"""


class Rest:
    """The application of one controller, behind its door. ``close`` ends streams and the index."""

    def __init__(self, controller: Controller, *, token: str, loopback: bool) -> None:
        self._controller = controller
        self.index = RunIndex(controller)
        self.pace = StepRate(controller, self.index)
        self.streams = EventStreams(controller, self.index)
        self.api = self._api()
        self._asgi = RestAuth(
            self.api,
            token=token,
            loopback=loopback,
            origins=lambda: other_urls(controller),
            policy=self._policy,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asgi(scope, receive, send)

    def close(self) -> None:
        self.streams.close()
        self.index.close()

    def _policy(self) -> str:
        """No script, style, image or connection but our own and those of the run's controllers."""
        hosts = " ".join(["'self'", *other_urls(self._controller)])
        return (
            f"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
            f"connect-src {hosts}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def _api(self) -> FastAPI:
        controller = self._controller
        api = FastAPI(
            title="Paceline",
            version="1",
            description=ABOUT,
            docs_url=None,  # they load scripts from elsewhere
            redoc_url=None,
            openapi_url="/api/v1/openapi.json",
            redirect_slashes=False,
        )
        problem_details.install(api)
        api.include_router(sse.router(self.streams))
        api.include_router(routes_query.router(controller, self.index, self.pace))
        api.include_router(routes_command.router(controller))
        exposition = PrometheusMetrics(controller, self.pace)

        @api.get("/healthz", summary="The process is alive", tags=["probes"])
        async def healthz() -> dict[str, str]:
            return {"status": "alive"}

        @api.get(
            "/readyz",
            summary="It leads, or follows the journal",
            tags=["probes"],
            responses=documented(503),
        )
        async def readyz() -> dict[str, str]:
            leader = controller.leader
            trouble = leader.trouble if leader is not None else controller.trouble
            if trouble:
                raise Problem(503, trouble, {"Retry-After": "1"})
            return {"status": "leader" if leader is not None else "standby"}

        @api.get(
            "/metrics",
            summary="Prometheus metrics",
            tags=["probes"],
            response_class=Response,
            responses={
                200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
                **documented(401, 429, 500),
            },
        )
        async def metrics() -> Response:
            await self.pace.look()
            return Response(exposition.text(), media_type=PrometheusMetrics.content_type)

        @api.get("/", include_in_schema=False)
        async def page() -> Response:
            return FileResponse(STATIC / "index.html")

        api.mount("/static", StaticFiles(directory=STATIC), name="static")
        describe = api.openapi

        def openapi() -> dict[str, Any]:
            if api.openapi_schema is None:
                api.openapi_schema = _completed(describe())
            return api.openapi_schema

        api.openapi = openapi  # type: ignore[method-assign]
        return api


def _completed(schema: dict[str, Any]) -> dict[str, Any]:
    parts = schema.setdefault("components", {})
    parts.setdefault("schemas", {})["Problem"] = schemas.ProblemModel.model_json_schema()
    for unused in ("HTTPValidationError", "ValidationError"):
        parts["schemas"].pop(unused, None)
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            # Reads need it only where the interface is bound to more than loopback.
            routes_query: list[dict[str, list[str]]] = (
                [] if path in OPEN_PATHS else [{}, {"token": []}]
            )
            operation["security"] = routes_query if method == "get" else [{"token": []}]
    add_examples(schema)
    return schema


def make_app(controller: Controller, *, token: str, loopback: bool) -> Rest:
    """The ASGI application of ``controller``; ``token``: what writes must present."""
    return Rest(controller, token=token, loopback=loopback)
