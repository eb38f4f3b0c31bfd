"""Payloads in an object store: emulators of S3 and of Google Cloud Storage, and what is no usable
store."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import BadInput
from paceline.ids import TaskId
from paceline.payloads.file_payloads import FsspecPayloads
from paceline.payloads.open_store import check_urls, open_payloads
from paceline.payloads.store import PayloadStore, Ref, StoreUnavailable
from paceline.redis.client import connect_sync
from paceline.rpc.addresses import free_ports
from paceline.weights.stored_weights import StoreWriter, read_weights
from paceline.weights.weight_snapshot import WeightSnapshot
from paceline.weights.weight_store import WeightStore, prefix_of
from testbed.patience import until
from testbed.redis.redis_process import throwaway_redis
from tests.fixtures.object_stores import s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[subprocess.Popen[bytes]]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def gs() -> Iterator[None]:
    """An emulator of Google Cloud Storage with one bucket."""
    pytest.importorskip("gcsfs", reason="pip install 'paceline[gcs]'")
    pytest.importorskip("gcp_storage_emulator", reason="pip install gcp-storage-emulator")
    from gcp_storage_emulator.server import create_server

    (port,) = free_ports("127.0.0.1", 1)
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        try:
            yield
        finally:
            server.stop()


@pytest.fixture(params=["s3", "gs", "memory", "file", "redis"])
async def stores(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[PayloadStore, PayloadStore]]:
    """One store twice, as two processes have it."""
    place = {"memory": "memory://a", "file": f"file://{tmp_path}"}
    with contextlib.ExitStack() as stack:
        if request.param == "redis":
            place["redis"] = stack.enter_context(throwaway_redis(tmp_path))
        elif request.param not in place:
            request.getfixturevalue(request.param)
        url = place.get(request.param, f"{request.param}://bucket/a")
        one, other = (open_payloads([url], "run", "") for _ in range(2))
        yield one, other
        await one.delete(await one.list())
        await one.close()
        await other.close()


def ref(name: str, attempt: int = 1) -> Ref:
    return TaskId(name), attempt


async def test_every_store_keeps_the_same_promises(
    stores: tuple[PayloadStore, PayloadStore],
) -> None:
    one, other = stores
    # The emulator of Google's protocol loses carriage returns at the end of an object.
    groups = {ref(f"t{n}"): bytes([n]) * (1 << 16) + b"." for n in range(20)}
    assert await other.list() == []
    assert await other.missing([ref("t1")]) == [ref("t1")]
    await one.put(groups)
    assert [x async for x in other.stream([*groups, ref("t99")])] == [*groups.values(), None]
    assert sorted(await other.list()) == sorted(groups)
    await one.put({ref("t0"): b"repeated"})
    assert await other.get([ref("t0"), ref("t0", 2)]) == [b"repeated", None]
    await other.delete([ref("t0"), ref("t99")])
    assert await one.missing([ref("t0"), ref("t1"), ref("t99")]) == [ref("t0"), ref("t99")]


@pytest.mark.parametrize("answer", ["deleted", "refused", "kept"])
async def test_many_objects_are_deleted_with_few_requests(
    s3: object, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """A store that takes no such request, or keeps the objects, is asked for one after the
    other."""
    import s3fs

    store = FsspecPayloads("s3://bucket/many", "run")
    groups = {ref(f"t{n}"): b"x" for n in range(4)}
    await store.put(groups)
    call, deletions = s3fs.S3FileSystem._call_s3, list[str]()

    async def noted(self: s3fs.S3FileSystem, method: str, *given: Any, **named: Any) -> Any:
        if method.startswith("delete"):
            deletions.append(method)
        if method == "delete_objects" and answer == "refused":
            raise OSError("NotImplemented")
        if method == "delete_objects" and answer == "kept":
            return {"Errors": [{"Code": "AccessDenied"}]}
        return await call(self, method, *given, **named)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", noted)
    await store.delete([*groups, ref("t99")])
    assert await store.list() == []
    assert deletions == ["delete_objects", *["delete_object"] * (0 if answer == "deleted" else 5)]
    await store.close()


async def test_a_url_with_characters_of_a_pattern_names_no_others(s3: object) -> None:
    one, other = (FsspecPayloads(f"s3://bucket/{name}", "run") for name in ("w[1]", "w1"))
    groups = {ref(f"t{n}"): b"x" for n in range(4)}
    await one.put(groups)
    await other.put(groups)
    await one.delete([*groups])
    assert await one.list() == [] and len(await other.list()) == len(groups)
    await one.close()
    await other.close()


async def test_what_a_killed_writer_left_goes_after_an_hour(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    await open_payloads([url], "run", "").put({ref("t1"): b"x"})
    old, new = (tmp_path / "run" / f"t{n}-1.group.77.part" for n in (2, 3))
    for path, age_s in ((old, 3700), (new, 0), (tmp_path / "run" / "t1-1.group", 3700)):
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    assert await open_payloads([url], "run", "").list() == [ref("t1")]
    assert not old.exists() and new.exists()


async def test_weights_go_through_an_object_store_bit_by_bit_and_are_swept(s3: object) -> None:
    weights = {"w": torch.randn(1000), "bias": torch.randn(7)}
    store, stored = WeightStore("s3://bucket/w", "run"), []
    writer = StoreWriter(store, "0123456789ab", torch.device("cpu"))
    for version in (1, 2):
        writer.write(WeightSnapshot.take(version, weights.items(), bucket_bytes=1024))
        await asyncio.to_thread(until, lambda: not writer.busy, 60.0)
        stored.append(writer.stored)
    await store.sweep(2, {prefix_of(stored[1])})
    reader = WeightStore("s3://bucket/w", "run")
    assert await asyncio.to_thread(reader.first, prefix_of(stored[0]), "manifest") is None
    cpu = torch.device("cpu")
    staged = await asyncio.to_thread(read_weights, reader, stored[1], {}, cpu)
    assert all(torch.equal(staged.tensors[name], weights[name]) for name in weights)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
async def test_a_bucket_that_is_not_there_is_no_lost_payload_on_writing(
    request: pytest.FixtureRequest, scheme: str
) -> None:
    request.getfixturevalue(scheme)
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await FsspecPayloads(f"{scheme}://no-such-bucket/b", "run").put({ref("t1"): b"x"})


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://no-such-bucket/x", "nothing can be stored"),
        ("gs://no-such-bucket/x", "nothing can be stored"),
        ("redis://127.0.0.1:1/0", "nothing can be stored.*Start the store"),
        ("file:///proc/payloads", "cannot be opened"),
        ("nosuch://bucket/x", "cannot be opened"),
    ],
)
async def test_a_store_that_cannot_be_used_is_named_before_the_run(
    s3: object, gs: object, url: str, said: str
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


async def test_without_gcsfs_the_package_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    # fsspec.registry is a mapping in the package, and hides the module.
    loaded = sys.modules["fsspec.registry"]._registry  # type: ignore[attr-defined]
    monkeypatch.delitem(loaded, "gs", raising=False)
    with pytest.raises(BadInput, match=r"gs://b/x needs a package.*paceline\[gcs\]"):
        await check_urls(["gs://b/x"])
