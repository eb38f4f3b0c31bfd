"""Listeners that are not the run's own: no credential is sent to them."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.config.sections.services import AuthConfig
from paceline.errors import BadInput
from paceline.process.files import NotOurs
from paceline.rpc import listeners
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable
from paceline.rpc.listeners import (
    UNPROVEN,
    add_port,
    client_credentials,
    run_certificate,
    socket_path,
)
from paceline.v1 import admin_pb2

TOKEN, OTHER = "0123456789abcdef0123", "another-token-of-a-stranger"
STATUS = "AdminService.GetStatus"


class Recorder(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every call, and keeps what its callers have sent."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        self.heard.append(details.invocation_metadata)

        async def answer(request: bytes, context: Any) -> bytes:
            return admin_pb2.StatusReply(run_name="impostor").SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer)


def _plain(server: grpc.aio.Server) -> int:
    return int(server.add_insecure_port("127.0.0.1:0"))


def _with_a_certificate_of_its_own(server: grpc.aio.Server) -> int:
    pair = run_certificate(OTHER)
    credentials = grpc.ssl_server_credentials([(pair.key, pair.certificate)])
    return int(server.add_secure_port("127.0.0.1:0", credentials))


@asynccontextmanager
async def listening(bind: Any) -> AsyncIterator[tuple[str, Recorder]]:
    server, recorder = grpc.aio.server(), Recorder()
    server.add_generic_rpc_handlers((recorder,))
    port = bind(server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", recorder
    finally:
        await server.stop(None)


@pytest.mark.parametrize("bind", [_plain, _with_a_certificate_of_its_own])
async def test_who_took_the_port_of_a_controller_is_sent_nothing(bind: Any, capfd: Any) -> None:
    async with listening(bind) as (address, recorder):
        control = ControlPlane([address], token=TOKEN)
        with pytest.raises(ControlPlaneUnavailable):
            await control.call(STATUS, admin_pb2.StatusRequest(), 1.0)
        await control.close()
    assert not recorder.heard
    assert "Handshake" not in capfd.readouterr().err


async def test_who_took_the_port_sees_no_token_in_what_arrives() -> None:
    arrived = bytearray()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\0\6\4\0\0\0\0\0")  # settings of HTTP/2, as a real server sends
        while data := await reader.read(1 << 16):
            arrived.extend(data)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    control = ControlPlane([f"127.0.0.1:{server.sockets[0].getsockname()[1]}"], token=TOKEN)
    with pytest.raises(ControlPlaneUnavailable):
        await control.call(STATUS, admin_pb2.StatusRequest(), 1.0)
    await control.close()
    server.close()
    assert arrived and TOKEN.encode() not in arrived


async def test_a_controller_of_the_run_proves_itself_and_another_runs_is_named() -> None:
    def bind(server: grpc.aio.Server) -> int:
        return add_port(server, "127.0.0.1:0", AuthConfig(), TOKEN)

    async with listening(bind) as (address, recorder):
        control = ControlPlane([address], token=TOKEN)
        assert (await control.call(STATUS, admin_pb2.StatusRequest(), 30.0)).run_name
        await control.close()
        assert len(recorder.heard) == 1
        for wrong in (OTHER, None):
            control = ControlPlane([address], token=wrong)
            with pytest.raises(ControlPlaneUnavailable) as refusal:
                await control.call(STATUS, admin_pb2.StatusRequest(), 1.0)
            assert UNPROVEN in str(refusal.value) or wrong is None
            await control.close()
        assert len(recorder.heard) == 1, "who has no token does not get as far as a call"


def test_sockets_are_in_a_directory_that_is_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "r"
    path = socket_path(run_dir, "controller-0")
    monkeypatch.setattr(listeners, "LONGEST_PATH", len(os.fspath(run_dir)) + 10)
    deep = socket_path(run_dir, "controller-0")
    for found in (path, deep):
        assert stat.S_IMODE(found.parent.lstat().st_mode) == 0o700
    assert deep.parent.parent == Path("/tmp")
    assert socket_path(run_dir, "controller-0") == deep, "every process of the run finds it"
    with pytest.raises(BadInput, match="--id"):
        socket_path(run_dir, "x" * 100)
    # A stranger can make a directory of that name once ours is gone.
    deep.parent.rmdir()
    deep.parent.mkdir(mode=0o777)
    deep.parent.chmod(0o777)
    other = socket_path(run_dir, "controller-0")
    assert other.parent != deep.parent
    for directory in (deep.parent, other.parent):
        directory.rmdir()
    other.parent.symlink_to(tmp_path)
    last = socket_path(run_dir, "controller-0").parent
    assert last not in (deep.parent, other.parent)
    other.parent.unlink()
    last.rmdir()


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_sockets_are_not_where_others_can_move_the_run_away(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid():
        pytest.skip("only root can choose any group")
    # A long path would send the sockets away for another reason.
    monkeypatch.setattr(listeners, "LONGEST_PATH", 4096)
    run_dir = tmp_path / "shared" / "run"
    run_dir.mkdir(parents=True, mode=0o700)
    os.chown(run_dir.parent, -1, 65534)
    run_dir.parent.chmod(mode | 0o1000)
    assert socket_path(run_dir, "controller-0").parent == run_dir / "sockets", "it is sticky"
    (run_dir / "sockets").rmdir()
    run_dir.parent.chmod(mode)
    path = socket_path(run_dir, "controller-0")
    assert not path.is_relative_to(run_dir)
    assert path == socket_path(run_dir, "controller-0")
    path.parent.rmdir()


def test_no_token_goes_to_a_socket_whose_directory_others_can_make(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/run/sockets/c.sock"
    tmp_path.chmod(0o700)
    assert client_credentials(address, TOKEN, None) == (None, [])
    tmp_path.chmod(0o1777)
    with pytest.raises(NotOurs, match="closed to other users"):
        client_credentials(address, TOKEN, None)
