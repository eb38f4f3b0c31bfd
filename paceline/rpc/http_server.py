"""HTTP server (uvicorn) inside a role's event loop. Imported on demand: uvicorn is slow to import.

Anyone who reaches the port can connect, so connections are bounded in number and time:

- A connection has ``REQUEST_S`` to complete a request, and ``HANDSHAKE_S`` for its TLS handshake.
- At ``most_connections`` a new one takes the place of the one that has waited longest without a
  request. If all have one, ``FOR_PROBES`` more are accepted, on which only probes are answered.
- Running out of files is logged once a minute. (asyncio's own server logs each failed attempt, and
  doubles its attempts.)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.process.files import open_files_limit
from paceline.process.structured_log import event

log = logging.getLogger(__name__)

REQUEST_S = 15.0
HANDSHAKE_S = 5.0
FOR_PROBES = 32
PROBES = frozenset({"/healthz", "/readyz"})
ACCEPT_AGAIN_S = 0.2
SAY_AGAIN_S = 60.0


class Connection(H11Protocol):
    """One connection. It is waiting while no complete request of it is being answered."""

    probes_only = False
    waiting_since = 0.0
    _ends: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.probes_only:
            self.app = _probes_only(self.app)
        self._wait()

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

    def _wait(self) -> None:
        self.waiting_since = self.loop.time()
        self._ends = self.loop.call_later(REQUEST_S, self.end)

    def _stop_waiting(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None

    def end(self) -> None:
        """Closes the connection without an answer."""
        self._stop_waiting()
        self.transport.abort()


class Http(uvicorn.Server):
    """A server that leaves signal handling to the role, and accepts connections itself."""

    def __init__(self, config: uvicorn.Config, most_connections: float) -> None:
        super().__init__(config)
        self._most = most_connections
        self._accepting: list[asyncio.Task[None]] = []
        self._opening: dict[asyncio.Task[None], socket.socket] = {}
        """Connections in their TLS handshake, oldest first."""
        self._said = -math.inf

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers = []
        self._accepting = [asyncio.create_task(self._accept(s)) for s in sockets or []]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in (*self._accepting, *self._opening):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._opening, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while listener.fileno() >= 0:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._say(error)
                    self._make_room()
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if self._count() >= self._most:
                self._make_room()
            if self._count() >= self._most + FOR_PROBES:
                accepted.close()
                continue
            probes_only = self._count() >= self._most
            task = asyncio.create_task(self._open(accepted, probes_only))
            self._opening[task] = accepted
            task.add_done_callback(lambda done: self._opening.pop(done, None))
            if self.config.ssl is None:
                # Without a handshake it is open at once, and may make room for the next one.
                await asyncio.wait({task})

    async def _open(self, accepted: socket.socket, probes_only: bool) -> None:
        loop, tls = asyncio.get_running_loop(), self.config.ssl

        def connection() -> Connection:
            made = Connection(self.config, self.server_state, self.lifespan.state, loop)
            made.probes_only = probes_only
            return made

        # A client that leaves, or speaks no TLS, is no event.
        with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
            try:
                await loop.connect_accepted_socket(
                    connection,
                    accepted,
                    ssl=tls,
                    ssl_handshake_timeout=HANDSHAKE_S if tls else None,
                )
            except BaseException:
                accepted.close()
                raise

    def _count(self) -> int:
        return len(self.server_state.connections) + len(self._opening)

    def _make_room(self) -> None:
        """Ends the connection that has waited longest, if one waits."""
        waiting = [
            c for c in self.server_state.connections if isinstance(c, Connection) and c.waiting
        ]
        if waiting:
            oldest = min(waiting, key=lambda c: c.waiting_since)
            oldest.end()
            # The transport tells it in the next round of the loop.
            self.server_state.connections.discard(oldest)
        elif self.config.ssl and self._opening:
            task = next(iter(self._opening))
            del self._opening[task]
            task.cancel()

    def _say(self, error: OSError) -> None:
        if time.monotonic() - self._said >= SAY_AGAIN_S:
            self._said = time.monotonic()
            event(log, "no connection can be accepted", why=error.strerror, level=logging.WARNING)


def _probes_only(app: Any) -> Any:
    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        answer = app if scope["path"] in PROBES else service_unavailable
        await answer(scope, receive, send)

    return guarded


def http_server(
    app: Any,
    *,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    most_connections: int | None = 512,
) -> Http:
    """``most_connections``: at most a quarter of the process's open files; None: no limit."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=1,
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )
    most = math.inf if most_connections is None else min(most_connections, open_files_limit() // 4)
    return Http(config, most)
