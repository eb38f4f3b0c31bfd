"""Errors as OpenAI's interface has them, so that clients raise what their users know."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """``code``: what programs look at, for example context_length_exceeded. ``param``: the field of
    the request that is at fault."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def unsupported(param: str, what: str) -> ApiError:
    return ApiError(400, what, "unsupported_parameter", param)


def invalid(param: str, what: str) -> ApiError:
    return ApiError(400, f"{param}: {what}", "invalid_value", param)
