"""Strangers' connections to an HTTP server: they stop neither probes nor requests of others."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from paceline.rpc import http_server as module
from paceline.rpc.http_server import http_server
from testbed.fleets.controllers import until

MOST = 8


class App:
    """Answers with the path; /hold answers once ``release`` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.held = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/hold":
            self.held += 1
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})


@asynccontextmanager
async def serving(most: int | None = MOST) -> AsyncIterator[tuple[App, Any, int]]:
    bound = socket.create_server(("127.0.0.1", 0), backlog=256)
    app = App()
    server = http_server(app, most_connections=most)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        await until(lambda: server.started)
        yield app, server, bound.getsockname()[1]
    finally:
        app.release.set()
        server.should_exit = True
        await task


def idle(port: int, number: int, first: bytes = b"") -> list[socket.socket]:
    found = []
    for _ in range(number):
        one = socket.create_connection(("127.0.0.1", port))
        one.sendall(first)
        found.append(one)
    return found


async def answer(port: int, path: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.get(f"http://127.0.0.1:{port}{path}")


@pytest.mark.parametrize(
    ("first", "most"), [(b"", MOST), (b"GET / HTTP/1.1\r\nHost: x\r\n", MOST), (b"", None)]
)
async def test_idle_connections_keep_nobody_out(
    first: bytes, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "open_files_limit", lambda: 2 * MOST)
    async with serving(most) as (_, server, port):
        strangers = idle(port, 10 * MOST, first)
        for path in ("/healthz", "/api"):
            assert (await answer(port, path)).text == path
        assert len(server.server_state.connections) <= MOST
        for one in strangers:
            one.close()


async def test_beyond_the_limit_a_request_is_answered_with_busy_and_none_is_lost() -> None:
    async with serving() as (app, _, port):
        held = [asyncio.create_task(answer(port, "/hold")) for _ in range(MOST)]
        await until(lambda: app.held == MOST)
        assert (await answer(port, "/api")).status_code == 503
        app.release.set()
        assert {(await one).text for one in held} == {"/hold"}
        assert (await answer(port, "/api")).text == "/api"


@pytest.mark.parametrize(
    "first",
    [b"", b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf"],
)
async def test_an_unfinished_request_is_ended(
    first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.2)
    async with serving() as (app, server, port):
        app.release.clear()
        (one,) = idle(port, 1, first)
        await until(lambda: server.server_state.connections)
        await until(lambda: not server.server_state.connections)
        one.close()


async def test_a_finished_request_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.1)
    async with serving() as (app, _, port):
        held = asyncio.create_task(answer(port, "/hold"))
        await until(lambda: app.held)
        await asyncio.sleep(0.3)  # nothing is to happen
        app.release.set()
        assert (await held).text == "/hold"
