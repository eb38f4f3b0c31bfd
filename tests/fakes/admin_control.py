"""One control plane of a launcher whose answers a test scripts."""

from typing import Any

from paceline.rpc.client import ControlPlaneUnavailable


class AdminControl:
    """``answers``, by the name of the RPC: a reply, an error that is raised, or a function of the
    request. For other RPCs no controller answers. ``heard``: every request with its RPC."""

    address = "127.0.0.1:1"

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.heard: list[tuple[str, Any]] = []

    async def call(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        name = method.rpartition(".")[2]
        self.heard.append((name, request))
        answer = self.answers.get(name, ControlPlaneUnavailable("no controller answers"))
        if isinstance(answer, Exception):
            raise answer
        return answer(request) if callable(answer) else answer

    def asked(self, name: str) -> list[Any]:
        return [request for rpc, request in self.heard if rpc == name]

    async def close(self) -> None: ...
