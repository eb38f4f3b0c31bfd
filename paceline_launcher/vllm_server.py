"""Process of vLLM's OpenAI server, and the key that all of its paths ask for.

vLLM's processes import this module again if they are spawned, and so Paceline before transformers
(see paceline/cuda_extensions.py): it must not be called ``__main__``. ``vllm serve`` asks for the
metadata of a package "vllm", which the CPU wheel does not have; its module of the server does not.
"""

from __future__ import annotations

import os
import runpy
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable from which vLLM reads its key."""
OPEN_PATHS = ("/health", "/ping")
_REFUSAL = (
    b'{"error": {"message": "a valid API key is needed: send the header Authorization: Bearer KEY",'
    b' "type": "authentication_error", "code": 401}}'
)

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


class KeyCheck:
    """ASGI application that refuses a request without the key before its body is read.

    vLLM's own check covers paths below ``/v1`` alone; others, such as ``/invocations``, generate
    as well.
    """

    def __init__(self, app: Callable[[_Message, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            kind = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": kind})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _may_pass(self, scope: _Message) -> bool:
        if scope["path"] in OPEN_PATHS and scope.get("method") in ("GET", "HEAD"):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(given, self._expected)


if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
