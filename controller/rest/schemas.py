"""Request bodies, replies and problem details (RFC 9457) of the REST interface: the schema that
OpenAPI publishes. What the ledger's views, the projection and protobuf messages say is a reply as
it is: workers are ``WorkerStatus`` and the diagnosis ``WhyReply`` of admin.proto. A fault of the
controller is a generic 500; the stack trace is only in its log."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.exceptions import HTTPException

from controller.ledger.state.settings import SettingChange
from paceline.config.sections.scorers import PREFIX
from paceline.worker_pools import TRAINING


class Reply(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class ProblemModel(Reply):
    """RFC 9457 problem details."""

    model_config = ConfigDict(title="Problem")

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str


class Done(Reply):
    accepted: bool
    message: str


def _integral(value: Any) -> Any:
    """JSON Schema counts 3.0 as an integer; strict types alone would refuse it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(ge=0, le=100_000, strict=True), BeforeValidator(_integral)]


class DesiredCounts(BaseModel):
    model_config = ConfigDict(extra="forbid")

    policy: Count | None = None
    rollout: Count | None = None
    scorers: dict[Annotated[str, Field(max_length=64)], Count] = Field(default_factory=dict)
    """By the name of the scorer: {"helpful": 3}."""
    training: Count | None = None
    """By itself: pairs that train, if devices are lent (fleet.sharing)."""

    @property
    def by_pool(self) -> dict[str, int]:
        """Counts as in `desired` of the run: {"policy": 1, "scorer:helpful": 3}."""
        named = {"policy": self.policy, "rollout": self.rollout}
        named |= {PREFIX + name: count for name, count in self.scorers.items()}
        named[TRAINING] = self.training
        return {pool: count for pool, count in named.items() if count is not None}


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    request_id: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")] = ""
    """Idempotency key. Empty: the request counts as a new one."""


class ScaleBody(DesiredCounts, RequestBody):
    """Desired counts; a role that is not named keeps its count."""

    expected: DesiredCounts | None = None
    """Desired counts that the caller saw: 409 if they have changed since."""


class DrainBody(RequestBody):
    replace: Annotated[bool, Field(strict=True)] = False
    """Start another worker in its place. Otherwise the desired count drops by one."""
    incarnation: Annotated[str, Field(pattern=r"^[0-9]{0,20}$")] = ""
    """Process that is meant: 409 if another one has its name by now."""


class SettingsBody(RequestBody):
    settings: Annotated[dict[str, Any], Field(min_length=1, max_length=64)]
    """Values by dotted name: {"train.optimizer.lr": 5e-7}. 422 names a setting that is fixed, and
    what works."""
    dry_run: Annotated[bool, Field(strict=True)] = False
    """Check only, and say what would change."""


class SettingsDone(Done):
    changes: dict[str, SettingChange]
    """By dotted name. Empty if the request was repeated."""


class StopBody(RequestBody):
    reason: Annotated[str, Field(max_length=256)] = "stopped by request"


MEDIA_TYPE = "application/problem+json"
_RFC_9110 = {413: "Content Too Large", 422: "Unprocessable Content"}
"""Phrases that differ between versions of Python."""
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "RFC 9457 problem details",
        "content": {MEDIA_TYPE: {"schema": ProblemModel.model_json_schema()}},
    }
}
"""``responses`` of every route, beside the usual one."""
TITLES = {status.value: status.phrase for status in HTTPStatus} | _RFC_9110


class Problem(HTTPException):
    """Raised anywhere in a handler; the response is made from it."""


def respond(
    status: int, detail: str, instance: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    body = ProblemModel(title=TITLES[status], status=status, detail=detail, instance=instance)
    return JSONResponse(body.model_dump(), status, headers, media_type=MEDIA_TYPE)


def answer_problems(app: FastAPI) -> None:
    """Makes every error of ``app`` a problem details response."""

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return respond(error.status_code, error.detail, request.url.path, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = [f"{'.'.join(str(x) for x in e['loc'])}: {e['msg']}" for e in error.errors()]
        kind = request.headers.get("content-type", "")
        if any(tuple(e["loc"]) == ("body",) for e in error.errors()) and "json" not in kind:
            errors = ["body: it is read as JSON only if the Content-Type is application/json"]
        return respond(422, "; ".join(errors[:8]), request.url.path)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        # The server logs the stack trace.
        return respond(500, "internal error of the controller: see its log", request.url.path)
