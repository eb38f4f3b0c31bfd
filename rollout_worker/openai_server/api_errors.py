"""Errors in OpenAI's format, so that clients raise the exceptions their users know."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

UNSUPPORTED = "unsupported_parameter"
INVALID = "invalid_value"


class ApiError(Exception):
    """``code``: for programs, for example context_length_exceeded. ``param``: the request's field
    at fault."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @classmethod
    def from_validation(cls, invalid: ValidationError) -> ApiError:
        """The first problem that pydantic found in a request's body."""
        problem = invalid.errors(include_url=False, include_context=False)[0]
        place, message = problem["loc"], problem["msg"]
        if problem["type"] == "json_invalid" or not place:
            return cls(
                400, f"the body is not a JSON object of a request: {message}", "invalid_json"
            )
        param = str(place[0])
        if param == "messages" and len(place) > 1:
            param = f"messages[{place[1]}]"
        if problem["type"] == "extra_forbidden":
            return cls(400, f"{param} is not supported here", UNSUPPORTED, param)
        code = UNSUPPORTED if problem["type"] in (UNSUPPORTED, "literal_error") else INVALID
        return cls(400, f"{'.'.join(map(str, place))}: {message}", code, param)
