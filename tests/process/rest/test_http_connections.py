"""Strangers' connections to an HTTP server: they stop neither probes nor requests of others."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.rpc import http_server as module
from paceline.rpc.http_server import http_server
from testbed.fleets.controllers import until
from tests.fixtures.certificates import self_signed

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
async def serving(
    most: int | None = MOST, tls: tuple[Path, Path] | None = None
) -> AsyncIterator[tuple[App, Any, int]]:
    bound = socket.create_server(("127.0.0.1", 0), backlog=256)
    app = App()
    certificate, key = map(str, tls) if tls else (None, None)
    server = http_server(app, tls_cert=certificate, tls_key=key, most_connections=most)
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


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01\x01\x00", b"GET / HTTP/1.1\r\n\r\n"])
async def test_handshakes_that_are_not_finished_count(first: bytes, tmp_path: Path) -> None:
    pair = self_signed(tmp_path)
    trust = ssl.create_default_context(cafile=str(pair[0]))
    async with serving(tls=pair) as (_, server, port):
        strangers = idle(port, 10 * MOST, first)
        async with httpx.AsyncClient(timeout=60, verify=trust) as client:
            for path in ("/healthz", "/api"):
                reply = await client.get(f"https://127.0.0.1:{port}{path}")
                assert reply.text == path
        await until(lambda: sum(map(has_ended, strangers)) >= 9 * MOST)
        assert len(server.server_state.connections) <= MOST
        for one in strangers:
            one.close()


async def test_a_request_may_come_with_the_end_of_the_handshake(tmp_path: Path) -> None:
    pair = self_signed(tmp_path)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    trust = ssl.create_default_context(cafile=str(pair[0]))
    tls = trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    async with serving(tls=pair) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises(ssl.SSLWantReadError):
            tls.do_handshake()
        done = False
        while not done:
            writer.write(outgoing.read())
            incoming.write(await reader.read(1 << 14))
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
                done = True
        tls.write(b"GET /api HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        writer.write(outgoing.read())
        incoming.write(await reader.read())
        assert tls.read().startswith(b"HTTP/1.1 200")
        writer.close()


def has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        # An alert of TLS may precede the end.
        return not connection.recv(1 << 10) or has_ended(connection)
    except BlockingIOError:
        return False
    except OSError:
        return True


async def test_beyond_the_limit_a_request_is_answered_with_busy_and_none_is_lost() -> None:
    async with serving() as (app, _, port):
        held = [asyncio.create_task(answer(port, "/hold")) for _ in range(MOST)]
        await until(lambda: app.held == MOST)
        assert (await answer(port, "/api")).status_code == 503
        app.release.set()
        assert {(await one).text for one in held} == {"/hold"}
        assert (await answer(port, "/api")).text == "/api"


@pytest.mark.parametrize(
    ("first", "tls"),
    [
        (b"", False),
        (b"GET / HTTP/1.1\r\n", False),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf", False),
        (b"", True),
    ],
)
async def test_an_unfinished_request_is_ended(
    first: bytes, tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.2)
    pair = self_signed(tmp_path) if tls else None
    async with serving(tls=pair) as (app, server, port):
        app.release.clear()
        (one,) = idle(port, 1, first)
        await until(lambda: has_ended(one))
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
