"""Socket and lifecycle of the REST interface. The web framework is imported later, in a thread, so
that a controller starts fast."""

import asyncio
import contextlib
import importlib
import json
import logging
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.replicated_controller import Controller
from controller.runtime import NotLeading
from controller.store.journal import Deposed
from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.process.structured_log import event
from paceline.rpc.addresses import bound_socket, free_ports, is_loopback
from paceline.rpc.auth import read_token

log = logging.getLogger(__name__)

BACKLOG = 256
STOP_S = 1.5
SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Door:
    """A bound socket, and the access control of the interface behind it."""

    socket: socket.socket
    url: str
    token: str
    loopback: bool


def open_door(
    config: Config, run_dir: Path, controller_id: str, *, token: str, host: str
) -> Door | None:
    """Binds the socket; None if the interface is disabled. ``token``: that requests must carry.
    ``host``: the name under which others reach this controller, unless rest.host is set. Raises
    BadInput for a port that is taken, and for an address other than loopback if no token is
    configured."""
    if not config.rest.enabled:
        return None
    address = config.rest.host or config.controller.host
    loopback = is_loopback(address)
    if not loopback and read_token(config.auth) is None:
        raise BadInput(
            f"rest.host = {address!r} is not loopback: anyone who reaches it could steer the run. "
            "Set auth.token_file (and auth.tls_cert, auth.tls_key), or bind to 127.0.0.1"
        )
    bound = bind(address, _ports(config, run_dir, controller_id, address))
    port = bound.getsockname()[1]
    scheme = "https" if config.auth.tls_cert else "http"
    shown = address if config.rest.host and address not in ("0.0.0.0", "::") else host
    if loopback and not is_loopback(shown):
        shown = address
    name = f"[{shown}]" if ":" in shown else shown
    return Door(bound, f"{scheme}://{name}:{port}", token, loopback)


def _ports(config: Config, run_dir: Path, controller_id: str, address: str) -> list[int]:
    # A restarted controller keeps the port that open dashboards and scrapers know. If that is taken
    # meanwhile, another one does less harm than no controller.
    before = re.search(r":(\d+)$", _written(run_dir, controller_id))
    known = [int(before[1])] if before else []
    if config.rest.port:
        number = re.search(r"(\d{1,4})$", controller_id)
        known = [config.rest.port + (int(number[1]) if number else 0), *known]
        return [*known, *free_ports(address, 1)] if before else known
    return [*known, *free_ports(address, 1)]


def _written(run_dir: Path, controller_id: str) -> str:
    try:
        found = json.loads((run_dir / "controllers" / f"{controller_id}.json").read_text())
        return str(found.get("rest") or "")
    except (OSError, ValueError, AttributeError):
        return ""


def bind(address: str, ports: list[int]) -> socket.socket:
    for port in ports:
        with contextlib.suppress(OSError, OverflowError):
            # Clients that connect before the framework is loaded wait; they are not refused.
            bound = bound_socket(address, port, backlog=BACKLOG)
            bound.setblocking(False)
            return bound
    raise BadInput(
        f"cannot listen on {address}:{ports[-1]}: the port is in use or the address is not of this "
        "host. Stop the process that uses it, or set rest.port to a free port (0: any)"
    )


@dataclass(slots=True)
class RestServer:
    """Server of ``controller`` at ``door``, from ``start`` to ``stop``. It may fail alone."""

    controller: Controller
    door: Door
    _server: Any = None
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._serve(), name="rest")

    async def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        if self._task is not None:
            if self._server is not None:
                await asyncio.wait({self._task}, timeout=STOP_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.door.socket.close()

    async def _serve(self) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await self._settled()
            self._server = await asyncio.to_thread(self._make)
            event(log, "rest serving", url=self.door.url)
            await self._server.serve(sockets=[self.door.socket])
        except Exception:
            log.exception("rest interface failed")

    async def _settled(self) -> None:
        """Returns once this controller leads durably or knows the leader. Imports hold the
        interpreter lock, and the first entry of a term must not wait for them."""
        while not self.controller.hint:
            leader = self.controller.leader
            if leader is not None and leader.ledger.state.term == leader.term:
                with contextlib.suppress(NotLeading, Deposed):
                    await leader.group_commit.durable()
                    return
            await asyncio.sleep(0.05)

    def _make(self) -> Any:
        app_module = importlib.import_module("controller.rest.app")
        http = importlib.import_module("paceline.rpc.http_server")
        app = app_module.Rest(self.controller, token=self.door.token, loopback=self.door.loopback)
        auth = self.controller.config.auth
        return http.http_server(app.asgi, tls_cert=auth.tls_cert, tls_key=auth.tls_key)
