"""HTTP server (uvicorn) inside a role's event loop. Imported on demand: uvicorn is slow to import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


class Http(uvicorn.Server):
    """A server that leaves signal handling to the role."""

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
    """``most_connections``: further connections are refused; None: no limit."""
    return Http(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
            limit_concurrency=most_connections,
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
        )
    )
