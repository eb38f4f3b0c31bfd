"""What strangers and refused callers can take of a controller's gRPC server: connections and
memory."""

import asyncio
import gc
import gzip
import socket
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import grpc
import grpc.aio
import psutil
import pytest

from controller.services.grpc_server import Services
from paceline.config.load import load_config
from paceline.config.sections.services import AuthConfig
from paceline.payloads.group_limits import Invalid
from paceline.rpc import listeners
from paceline.rpc.client import ControlPlane, RequestRefused
from paceline.rpc.listeners import add_port, new_server
from paceline.v1 import admin_pb2, scorer_pb2
from scorer_worker.server import ScorerServer
from testbed.fleets.controller_processes import write_config
from testbed.fleets.controllers import running_controllers, status, until

TOKEN = "0123456789abcdef0123"
BODY_MB = 60
BODIES = 8


class Request:
    """Stands for a large message: one can see when it is gone."""


class Call:
    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None

    async def abort(self, code: grpc.StatusCode, *_: Any) -> None:
        self.code = code
        raise grpc.aio.AbortError


class NoController:
    leader = None


@pytest.mark.parametrize("error", [Invalid("malformed"), ZeroDivisionError()])
async def test_a_refused_request_is_gone_before_its_refusal_is_sent(error: Exception) -> None:
    async def refuse(controller: Any, request: Any) -> None:
        kept = request
        assert kept is not None
        raise error

    services = Services(NoController(), {"AdminService.Stop": refuse}, TOKEN)  # type: ignore[arg-type]
    handler = services._handlers["/paceline.v1.AdminService/Stop"]
    call, seen = Call(), []

    async def abort(code: grpc.StatusCode, *_: Any) -> None:
        seen.append(gone())
        raise grpc.aio.AbortError

    call.abort = abort  # type: ignore[method-assign]
    gc.disable()
    try:
        request = Request()
        gone = weakref.ref(request)
        running = handler.unary_unary(request, call)
        del request
        with pytest.raises(grpc.aio.AbortError):
            await running
        assert seen == [None]
    finally:
        gc.enable()


async def test_a_body_without_a_token_is_refused_unread(tmp_path: Path) -> None:
    body = gzip.compress(bytes(BODY_MB << 20))
    with running_controllers(tmp_path, 1) as controllers:
        process = psutil.Process(controllers.started[0].pid)
        before = peak(process)
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(
            controllers.started[0].address, options=options, compression=grpc.Compression.Gzip
        ) as channel:
            submit = channel.unary_unary("/paceline.v1.RolloutService/SubmitGroups")
            calls = [submit(bytes(BODY_MB << 20)) for _ in range(BODIES)]
            for call in calls:
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len(body) < 1 << 20, "a small body becomes a large one"
        assert peak(process) - before < 2 * BODY_MB


def peak(process: psutil.Process) -> int:
    """MB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10


async def test_one_connection_has_so_many_calls_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """157,000 streams in 4 s of a stranger had others' calls cancelled, and took 130 MB."""
    monkeypatch.setattr(listeners, "MOST_CALLS", 4)
    running, release = [], asyncio.Event()

    async def hold(controller: Any, request: Any) -> admin_pb2.StatusReply:
        running.append(request)
        await release.wait()
        return admin_pb2.StatusReply()

    server = new_server(load_config(write_config(tmp_path), []))
    handlers = {"AdminService.GetStatus": hold}
    server.add_generic_rpc_handlers((Services(NoController(), handlers, TOKEN),))  # type: ignore[arg-type]
    control = ControlPlane(
        [f"127.0.0.1:{add_port(server, '127.0.0.1:0', AuthConfig(), TOKEN)}"], token=TOKEN
    )
    await server.start()
    calls = [asyncio.create_task(status(control)) for _ in range(12)]
    await until(lambda: len(running) >= 4)
    await asyncio.sleep(0.2)  # nothing is to happen
    assert len(running) == 4
    release.set()
    await asyncio.gather(*calls)
    await control.close()
    await server.stop(0)


async def test_idle_connections_leave_room_for_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a scorer, whose server has the limits of a controller's."""
    monkeypatch.setattr(listeners, "open_files_limit", lambda: 32)
    monkeypatch.setattr(listeners, "HANDSHAKE_MS", 1000)
    scorer = ScorerServer(load_config(write_config(tmp_path)), "kind", ANY, TOKEN)
    address = await scorer.start("127.0.0.1")
    door = ("127.0.0.1", int(address.rpartition(":")[2]))
    strangers = [socket.create_connection(door) for _ in range(100)]
    files = psutil.Process().num_fds()
    control = ControlPlane([address], token=TOKEN)
    try:
        with pytest.raises(RequestRefused, match="this is the scorer kind"):
            await control.call("ScorerService.Score", scorer_pb2.ScoreRequest())
        assert psutil.Process().num_fds() < files + 100, "most were never accepted"
    finally:
        await control.close()
        for one in strangers:
            one.close()
        await scorer.close()
    await asyncio.sleep(0)
