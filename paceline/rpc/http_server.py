"""HTTP server (uvicorn) inside a role's event loop. Imported on demand: uvicorn is slow to import.

Anyone who reaches the port can connect. A connection has ``REQUEST_S`` to complete a request; at
``most_connections`` a new one takes the place of the one that has waited longest without a request,
and if all have one, is answered with 503. More protection is a reverse proxy's: docs/security.md.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.process.files import open_files_limit

REQUEST_S = 15


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
    """Server that leaves signal handling to the role."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
        limit_concurrency=limit + 1,
        timeout_keep_alive=REQUEST_S,
        timeout_graceful_shutdown=1,
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )
    return Http(config)
