"""REST application: /api/v1, probes, Prometheus metrics and the dashboard."""

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

from controller.replicated_controller import Controller
from controller.rest import commands, queries
from controller.rest.auth import RestAuth
from controller.rest.prometheus import PrometheusMetrics
from controller.rest.schemas import PROBLEMS, Problem, answer_problems
from controller.status import trouble_of

STATIC = Path(__file__).parent / "static"
ABOUT = """State, curves, events and samples of a run, and commands that steer it.

Every controller answers reads. Writes need the run's token, and the leader decides them: a standby
answers 307 with the leader's URL. Errors are RFC 9457 problem details.
"""


class Rest:
    """Application of one controller, with access control: writes must present ``token``. ``asgi``
    answers requests."""

    def __init__(self, controller: Controller, *, token: str, loopback: bool) -> None:
        self._controller = controller
        self.api = self._api()
        self.asgi = RestAuth(
            self.api,
            token=token,
            loopback=loopback,
            origins=self._other_urls,
            policy=self._policy,
        )

    def _other_urls(self) -> list[str]:
        """REST URLs of the other controllers, silent ones included."""
        own = self._controller.identity.controller_id
        urls = (peer.get("rest") for name, peer in self._controller.peers.items() if name != own)
        return [url for url in urls if url]

    def _policy(self) -> str:
        """Only scripts, styles and images of this controller; connections to the controllers."""
        hosts = " ".join(["'self'", *self._other_urls()])
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
            docs_url=None,  # it loads scripts from other sites
            redoc_url=None,
            openapi_url="/api/v1/openapi.json",
            redirect_slashes=False,
            responses=PROBLEMS,
        )
        answer_problems(api)
        api.include_router(queries.router(controller))
        commands.install(api, controller)
        exposition = PrometheusMetrics(controller)

        @api.get("/healthz", summary="Liveness of the process", tags=["probes"])
        async def healthz() -> dict[str, str]:
            return {"status": "alive"}

        @api.get("/readyz", summary="Ready: leads or follows the journal", tags=["probes"])
        async def readyz() -> dict[str, str]:
            if trouble := trouble_of(controller):
                raise Problem(503, trouble, {"Retry-After": "1"})
            return {"status": "leader" if controller.leader is not None else "standby"}

        @api.get("/metrics", tags=["probes"], response_class=PlainTextResponse)
        async def metrics() -> Response:
            """Prometheus metrics."""
            await controller.context.projector.look()
            return Response(exposition.text(), media_type=PrometheusMetrics.content_type)

        @api.get("/", include_in_schema=False)
        async def page() -> Response:
            return FileResponse(STATIC / "index.html")

        api.mount("/static", StaticFiles(directory=STATIC), name="static")
        return api
