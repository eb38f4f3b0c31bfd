"""Problem details (RFC 9457) of the REST interface. What the ledger's views, the projection and
protobuf messages say is a reply as it is: workers are ``WorkerStatus`` and the diagnosis
``WhyReply`` of admin.proto, and bodies are its requests. A fault of the controller is a generic
500; the stack trace is only in its log."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException


class ProblemModel(BaseModel):
    """RFC 9457 problem details."""

    model_config = ConfigDict(title="Problem")

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str


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
