"""HTTP server (uvicorn) inside a role's event loop. Imported on demand: uvicorn is slow to import.

Anyone who reaches the port can connect. A connection has ``REQUEST_S`` to complete a request; at
``most_connections`` a new one takes the place of the one that has waited longest without a request,
and if all have one, is answered with 503. As many, and at most a quarter of the open files, may be
in their handshakes of TLS; a further one ends the oldest. More protection is a reverse proxy's:
docs/security.md.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.process.files import open_files_limit

REQUEST_S = 15
BUSY_S = 0.1


class Connection(H11Protocol):
    """Connection of a client. It is waiting while no complete request of it is being answered."""

    waiting_since = 0.0
    _ends: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        if self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.waiting:
            self._stop_waiting()
        elif self._ends is None:
            self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.waiting_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def waiting(self) -> bool:
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _make_room(self) -> None:
        others = [c for c in self.connections if isinstance(c, Connection) and c.waiting]
        oldest = min(others, key=lambda c: c.waiting_since)
        if oldest is not self:
            oldest.transport.abort()
            # The transport tells it in the next round of the loop.
            self.connections.discard(oldest)

    def _wait(self) -> None:
        self.waiting_since = self.loop.time()
        self._ends = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None


class Http(uvicorn.Server):
    """Server that leaves signal handling to the role, and bounds handshakes of TLS, which the event
    loop's own listener does not."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, limit: int) -> None:
        super().__init__(config)
        self._tls, self._limit = tls, limit
        self._handshakes: dict[socket.socket, asyncio.Task[None]] = {}  # the oldest first
        self._accepting: list[asyncio.Task[None]] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
            return
        await super().startup([])
        for bound in sockets or ():
            bound.setblocking(False)
        accepting = (self._accept(bound, self._tls) for bound in sockets or ())
        self._accepting = [asyncio.create_task(each) for each in accepting]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in [*self._accepting, *self._handshakes.values()]:
            task.cancel()
        await super().shutdown(sockets)

    async def _accept(self, bound: socket.socket, tls: ssl.SSLContext) -> None:
        while True:
            try:
                client, _ = await asyncio.get_running_loop().sock_accept(bound)
            except OSError:
                await asyncio.sleep(BUSY_S)  # no open file is left
                continue
            if len(self._handshakes) >= self._limit:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._handshakes[client] = asyncio.create_task(self._greet(client, tls))
            await asyncio.sleep(0)  # accepting alone would not yield in a flood

    async def _greet(self, client: socket.socket, tls: ssl.SSLContext) -> None:
        def connection() -> Connection:
            return Connection(self.config, self.server_state, {})

        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(
                connection, client, ssl=tls, ssl_handshake_timeout=REQUEST_S
            )
        self._handshakes.pop(client, None)


def http_server(
    app: Any,
    *,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    most_connections: int | None = 512,
) -> Http:
    """``most_connections``: at most a quarter of the process's open files; None: half of them."""
    files = open_files_limit()
    limit = min(most_connections, files // 4) if most_connections else files // 2
    tls = None
    if tls_cert is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(tls_cert, tls_key)
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        log_level="error",  # strangers' garbage is a warning
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limit + 1,
        timeout_keep_alive=REQUEST_S,
        timeout_graceful_shutdown=1,
    )
    return Http(config, tls, min(limit, files // 4))
