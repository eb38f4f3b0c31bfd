"""The embedded Redis for workers on other machines: TLS, and nothing for strangers."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from controller.fleet.sessions import Sessions
from controller.ledger import Ledger
from paceline.config.schema import Config
from paceline.config.sections.services import RedisConfig
from paceline.ids import TaskId
from paceline.payloads.redis_payloads import RedisPayloads
from paceline.payloads.store import StoreUnavailable
from paceline.redis import client, tls_front
from paceline.redis.client import connect, connect_sync, front_port
from paceline.redis.server import RedisEndpoint, ensure_redis, out_of_reach, stop_redis
from paceline.redis.tls_front import front_process
from paceline.rpc.addresses import bound_socket
from paceline.rpc.session import WorkerSession
from paceline.v1 import common_pb2, worker_pb2
from testbed.patience import patient

CONFIG = RedisConfig(host="0.0.0.0")
LOGIN = b"*3\r\n$4\r\nAUTH\r\n$6\r\nworker\r\n$5\r\nwrong\r\n"


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[RedisEndpoint]:
    try:
        yield ensure_redis(tmp_path, CONFIG)
    finally:
        stop_redis(tmp_path)
    assert front_process(tmp_path / "redis") is None


def connected(url: str) -> ssl.SSLSocket:
    """A stranger's connection to the front."""
    parts = urlsplit(url)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection((parts.hostname, parts.port), timeout=30))


def reach(url: str, data: bytes) -> bytes:
    """What a stranger gets who sends ``data``, until the connection ends."""
    with connected(url) as stranger:
        stranger.sendall(data)
        answer = b""
        while more := stranger.recv(1 << 12):
            answer += more
    return answer


def test_workers_log_in_over_tls_and_strangers_keep_no_connection(
    endpoint: RedisEndpoint, tmp_path: Path
) -> None:
    url = endpoint.worker_url_at("127.0.0.1")
    payload = bytes(3 << 20)
    with connect_sync(url) as client:
        client.mset({"paceline:r:payload:1": payload})
        assert client.mget(["paceline:r:payload:1"]) == [payload]
    assert asyncio.run(read_beside_others(url, "paceline:r:payload:1")) == [payload]
    for words in (b"PING\r\n", b"*1\r\n$5\r\nRESET\r\n", b"*1\r\n$4\r\nQUIT\r\n" + LOGIN):
        assert reach(url, words) == b""
    assert reach(url, LOGIN).startswith(b"-WRONGPASS")
    with pytest.raises(redis.ConnectionError), connect_sync(url.split("&ssl_ca_data")[0]) as client:
        client.ping()


async def read_beside_others(url: str, key: str) -> list[bytes]:
    async with connect(url) as client:
        values: list[bytes] = await client.mget([key])
        return values


def test_the_server_has_no_connection_of_who_has_not_sent_a_whole_login(
    endpoint: RedisEndpoint,
) -> None:
    url = endpoint.worker_url_at("127.0.0.1")
    assert reach(url, LOGIN).startswith(b"-WRONGPASS")  # the front has started
    with connect_sync(endpoint.url) as client, contextlib.ExitStack() as stack:
        before = client.info("clients")["connected_clients"]
        for _ in range(20):
            stranger = stack.enter_context(connected(url))
            stranger.sendall(LOGIN[:15])
        with connected(url) as one:
            for at in range(len(LOGIN)):  # a login may come in pieces
                one.sendall(LOGIN[at : at + 1])
            assert one.recv(1 << 12).startswith(b"-WRONGPASS")
        assert client.info("clients")["connected_clients"] <= before + 1


async def test_idle_connections_beyond_a_number_give_way_to_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_front, "MOST_STRANGERS", 4)
    tls_front._certificate(tmp_path)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 12)
        writer.write(b"-WRONGPASS\r\n")
        writer.close()

    server = await asyncio.start_unix_server(refuse, tmp_path / "server")
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    front = asyncio.create_task(tls_front._serve(listener, tmp_path, tmp_path / "server"))
    strangers = [socket.create_connection(address, timeout=5) for _ in range(20)]
    answer = await asyncio.to_thread(reach, f"rediss://127.0.0.1:{address[1]}", LOGIN)
    assert answer.startswith(b"-WRONGPASS")
    assert [await asyncio.to_thread(one.recv, 1) for one in strangers[:16]] == [b""] * 16
    for one in strangers:
        one.close()
    front.cancel()
    await asyncio.gather(front, return_exceptions=True)
    server.close()


async def test_one_whose_time_is_over_gives_way_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepting = asyncio.get_running_loop().create_future()

    async def start_server(connected: Any, **_: Any) -> None:
        accepting.set_result(connected)
        await asyncio.Event().wait()

    monkeypatch.setattr(tls_front, "MOST_STRANGERS", 1)
    monkeypatch.setattr(tls_front, "FIRST_S", 0.0)
    monkeypatch.setattr(asyncio, "start_server", start_server)
    tls_front._certificate(tmp_path)
    front = asyncio.create_task(tls_front._serve(socket.socket(), tmp_path, tmp_path))
    connected = await accepting
    writer = SimpleNamespace(start_tls=lambda _: asyncio.Event().wait(), close=lambda: None)
    first = asyncio.create_task(connected(None, writer))
    await asyncio.sleep(0)  # its timeout comes before the next task, and its end after that
    await asyncio.gather(first, asyncio.create_task(connected(None, writer)))
    front.cancel()


def test_nobody_takes_its_port_over_or_is_sent_a_password(
    endpoint: RedisEndpoint, tmp_path: Path
) -> None:
    url = endpoint.worker_url_at("127.0.0.1")
    assert endpoint.front is not None
    port = endpoint.front.port
    front = front_process(tmp_path / "redis")
    assert front is not None
    front.kill()
    front.wait(30)
    for address in ("127.0.0.1", "0.0.0.0", "::"):
        with pytest.raises(OSError, match="in use"):
            bound_socket(address, port)
    tls_front._held.pop(tmp_path / "redis").close()  # As if all controllers had ended, too.
    with impostor(tmp_path, port) as heard:
        with pytest.raises(redis.ConnectionError), connect_sync(url) as client:
            client.ping()
        assert heard == []
        assert ensure_redis(tmp_path, CONFIG).worker_url_at("127.0.0.1") == url
        assert f"port {port} is free" in out_of_reach(tmp_path, CONFIG)
    ensure_redis(tmp_path, CONFIG)
    assert out_of_reach(tmp_path, CONFIG) == ""
    with connect_sync(url) as client:
        assert client.ping()


async def test_workers_that_outlive_all_else_follow_it_to_another_port(
    endpoint: RedisEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_moved", [])
    url, ref = endpoint.worker_url_at("127.0.0.1"), (TaskId("t1"), 1)
    store = RedisPayloads([url], "r")
    await asyncio.to_thread(reach, url, LOGIN)  # the front has started
    await store.put({ref: b"x"})
    stop_redis(tmp_path)
    with socket.create_server(("0.0.0.0", front_port(url))):
        moved = ensure_redis(tmp_path, CONFIG).worker_url_at("127.0.0.1")
        with pytest.raises(StoreUnavailable):
            await store.get([ref])
        sessions = Sessions(1, Ledger(), redis_port=front_port(moved))
        told = sessions.refresh(sessions.open(worker_pb2.Report()))
        assert told is not None and told.redis_port == front_port(moved) != front_port(url)
        await hear(told)
        await asyncio.to_thread(reach, moved, LOGIN)
        assert await store.get([ref]) == [b"x"]
        with connect_sync(url) as meeting:
            assert meeting.ping()
    await store.close()


async def hear(directive: worker_pb2.Directive) -> None:
    """The directive reaches a worker's session."""
    control: Any = SimpleNamespace(address="a", prefer=lambda _: None, leave=lambda _: None)
    session = WorkerSession(
        control,
        worker_id="w",
        role=common_pb2.ROLE_ROLLOUT,
        config=Config.model_validate({"model": {"path": "m"}, "data": {"path": "d"}}),
        report=worker_pb2.Report,
    )
    directive.term, directive.lifecycle = 2, worker_pb2.LIFECYCLE_RUNNING

    async def connect(_: str) -> AsyncIterator[worker_pb2.Directive]:
        yield directive
        session._closed.set()

    session._connect = connect  # type: ignore[method-assign]
    await session.run()


def test_it_ends_with_its_directory(endpoint: RedisEndpoint, tmp_path: Path) -> None:
    front = front_process(tmp_path / "redis")
    assert front is not None
    away = (tmp_path / "redis").rename(tmp_path / "away")
    front.wait(patient(30))
    away.rename(tmp_path / "redis")


@contextmanager
def impostor(home: Path, port: int) -> Iterator[list[bytes]]:
    heard: list[bytes] = []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls_front._certificate(home)  # of its own
    context.load_cert_chain(home / "front.pem")

    def serve(listener: socket.socket) -> None:
        try:
            plain, _ = listener.accept()
            with plain, context.wrap_socket(plain, server_side=True) as client:
                heard.append(client.recv(1 << 12))
        except OSError:
            pass  # the client has left, as it should

    with socket.create_server(("0.0.0.0", port)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield heard
        thread.join(30)
