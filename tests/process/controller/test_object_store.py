"""Payloads in an object store: the S3 protocol against moto's server, and what is no usable
store."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest

from paceline.errors import BadInput
from paceline.ids import TaskId
from paceline.payloads.fsspec_payloads import FsspecPayloads
from paceline.payloads.open_store import check_urls, open_payloads
from paceline.payloads.store import PayloadStore, Ref, StoreUnavailable
from paceline.redis.client import connect_sync
from paceline.rpc.ports import free_ports
from testbed.patience import Patience
from testbed.redis.redis_process import throwaway_redis


@pytest.fixture(scope="module")
def s3() -> Iterator[subprocess.Popen[bytes]]:
    """A server of the S3 protocol, named as a user would name it."""
    (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        try:
            await_server(server, port)
            fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
            yield server
        finally:
            server.kill()
            server.wait()


def await_server(server: subprocess.Popen[bytes], port: int) -> None:
    """Returns once it listens; it says nothing of it, and takes seconds on a busy machine."""
    patience = Patience(120)
    while True:
        assert server.poll() is None and patience.left()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


@pytest.fixture(params=["s3", "memory", "file", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[PayloadStore]:
    if request.param == "redis":
        with throwaway_redis(tmp_path) as url:
            found = open_payloads([url], "run", "")
            yield found
            await found.close()
        return
    if request.param == "s3":
        request.getfixturevalue("s3")
    place = {"s3": "s3://bucket/a", "memory": "memory://a", "file": f"file://{tmp_path}"}
    found = open_payloads([place[request.param]], "run", "")
    yield found
    await found.delete(await found.list())
    await found.close()


def ref(name: str, attempt: int = 1) -> Ref:
    return TaskId(name), attempt


async def test_every_store_keeps_the_same_promises(store: PayloadStore) -> None:
    groups = {ref(f"t{n}"): bytes([n]) * (1 << 16) for n in range(20)}
    assert await store.list() == []
    await store.put(groups)
    assert [x async for x in store.stream([*groups, ref("t99")])] == [*groups.values(), None]
    assert sorted(await store.list()) == sorted(groups)
    await store.put({ref("t0"): b"repeated"})
    assert await store.get([ref("t0"), ref("t0", 2)]) == [b"repeated", None]
    await store.delete([ref("t0"), ref("t99")])
    assert await store.missing([ref("t0"), ref("t1"), ref("t99")]) == [ref("t0"), ref("t99")]


async def test_what_another_process_has_written_is_seen(s3: object) -> None:
    one, other = (FsspecPayloads("s3://bucket/b", "run") for _ in range(2))
    assert await other.list() == []
    assert await other.missing([ref("t1")]) == [ref("t1")]
    await one.put({ref("t1"): b"payload"})
    assert await other.list() == [ref("t1")]
    assert await other.missing([ref("t1")]) == []
    await other.delete([ref("t1")])
    assert await one.get([ref("t1")]) == [None]


async def test_a_bucket_that_is_not_there_is_no_lost_payload_on_writing(s3: object) -> None:
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await FsspecPayloads("s3://no-such-bucket/b", "run").put({ref("t1"): b"x"})


async def test_a_store_that_can_be_used_passes_the_check(s3: object, tmp_path: Path) -> None:
    for url in ("s3://bucket/checked", f"file://{tmp_path}"):
        await check_urls([url])
    assert fsspec.filesystem("s3").find("bucket/checked") == [], "the check leaves nothing"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://no-such-bucket/x", "nothing can be stored"),
        ("redis://127.0.0.1:1/0", "nothing can be stored.*Start the store"),
        ("file:///proc/payloads", "cannot be opened"),
        ("nosuch://bucket/x", "cannot be opened"),
    ],
)
async def test_a_store_that_cannot_be_used_is_named_before_the_run(
    s3: object, url: str, said: str
) -> None:
    with pytest.raises(BadInput, match=f"payloads.url: .*{said}"):
        await check_urls([url])


async def test_a_store_without_room_is_named_before_the_run(tmp_path: Path) -> None:
    with throwaway_redis(tmp_path) as url, connect_sync(url) as client:
        client.config_set("maxmemory", "1mb")
        client.config_set("maxmemory-policy", "noeviction")
        with pytest.raises(BadInput, match=r"payloads\.url: .*is full: give it more memory"):
            await check_urls([url])


async def test_a_store_that_forgets_is_named_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from paceline.payloads.file_payloads import FilePayloads

    async def nothing(self: FilePayloads, refs: list[Ref]) -> list[None]:
        await asyncio.sleep(0)
        return [None for _ in refs]

    monkeypatch.setattr(FilePayloads, "get", nothing)
    with pytest.raises(BadInput, match="did not return what was written"):
        await check_urls([f"file://{tmp_path}"])
