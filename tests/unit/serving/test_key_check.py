"""Every path of the served model asks for the key, not only those below /v1."""

from typing import Any

import httpx
import pytest

from paceline_launcher.vllm_server import KeyCheck

KEY = "0123456789abcdef"


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> httpx.AsyncClient:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    transport = httpx.ASGITransport(KeyCheck(inner))
    return httpx.AsyncClient(transport=transport, base_url="http://served")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations", "/metrics", "/health/x"])
async def test_a_path_is_open_with_the_key_alone(client: httpx.AsyncClient, path: str) -> None:
    for wrong in ({}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY}):
        refused = await client.post(path, headers=wrong)
        assert refused.status_code == 401 and "key" in refused.json()["error"]["message"]
    given = await client.post(path, headers={"Authorization": f"Bearer {KEY}"})
    assert given.status_code == 200 and given.text == "inside"


async def test_probes_need_no_key_and_nothing_else_on_their_path(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.get("/health")).status_code == 200
    # vLLM serves models of a certain cloud at POST /ping and POST /invocations.
    assert (await client.post("/ping")).status_code == 401


async def test_a_socket_without_the_key_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await KeyCheck(inner)(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
