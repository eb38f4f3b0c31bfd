"""Process of vLLM's OpenAI server, and the key that all of its paths ask for.

vLLM's processes import this module again if they are spawned, and so Paceline before transformers
(see paceline/cuda_extensions.py): it must not be called ``__main__``. ``vllm serve`` asks for the
metadata of a package "vllm", which the CPU wheel does not have; its module of the server does not.
"""

import os
import runpy
import secrets
from typing import Any

OPEN_PATHS = ("/health", "/ping")


class KeyCheck:
    """ASGI application that refuses a request without the key before its body is read. vLLM's own
    check covers paths below ``/v1`` alone; others, such as ``/invocations``, generate as well."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        probe = scope.get("path") in OPEN_PATHS and scope.get("method") in ("GET", "HEAD")
        if scope["type"] == "lifespan" or probe or secrets.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            from fastapi.responses import JSONResponse

            error = {"message": "a valid API key is needed: send Authorization: Bearer KEY"}
            refusal = JSONResponse({"error": error}, 401, {"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)


if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
