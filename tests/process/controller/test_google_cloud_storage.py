"""Payloads in Google Cloud Storage, against an emulator of its protocol; and what is said without
its library."""

import sys
from collections.abc import Iterator

import fsspec  # noqa: F401  (its registry)
import pytest

from paceline.errors import BadInput
from paceline.ids import TaskId
from paceline.payloads.open_store import check_urls, open_payloads
from paceline.payloads.store import Ref, StoreUnavailable
from paceline.rpc.ports import free_ports


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """URL of a prefix in an emulated bucket."""
    pytest.importorskip("gcsfs", reason="pip install 'paceline[gcs]'")
    pytest.importorskip("gcp_storage_emulator", reason="pip install gcp-storage-emulator")
    from gcp_storage_emulator.server import create_server

    (port,) = free_ports("127.0.0.1", 1)
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        try:
            yield "gs://bucket/a"
        finally:
            server.stop()


def ref(name: str, attempt: int = 1) -> Ref:
    return TaskId(name), attempt


async def test_google_cloud_storage_keeps_the_promises_of_a_store(bucket: str) -> None:
    store, other = (open_payloads([bucket], "run", "") for _ in range(2))
    # The emulator loses carriage returns at the end of an object.
    groups = {ref(f"t{n}"): bytes([n]) * (1 << 16) + b"." for n in range(20)}
    assert await store.list() == []
    await store.put(groups)
    assert [x async for x in store.stream([*groups, ref("t99")])] == [*groups.values(), None]
    assert sorted(await other.list()) == sorted(groups), "seen by another process"
    await store.put({ref("t0"): b"repeated"})
    assert await other.get([ref("t0"), ref("t0", 2)]) == [b"repeated", None]
    await other.delete([ref("t0"), ref("t99")])
    assert await store.missing([ref("t0"), ref("t1"), ref("t99")]) == [ref("t0"), ref("t99")]
    await store.delete(await store.list())
    await store.close()
    await other.close()


async def test_a_bucket_passes_the_check_and_one_that_is_not_there_is_named(bucket: str) -> None:
    await check_urls([bucket])
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await open_payloads(["gs://no-such-bucket/x"], "run", "").put({ref("t1"): b"x"})
    with pytest.raises(BadInput, match=r"payloads\.url: nothing can be stored"):
        await check_urls(["gs://no-such-bucket/x"])


@pytest.mark.parametrize("scheme", ["gs", "gcs"])
async def test_without_gcsfs_the_package_to_install_is_named(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    # fsspec.registry is a mapping in the package, and hides the module.
    loaded = sys.modules["fsspec.registry"]._registry  # type: ignore[attr-defined]
    monkeypatch.delitem(loaded, scheme, raising=False)
    with pytest.raises(BadInput, match=rf"{scheme}://b/x needs a package.*paceline\[gcs\]"):
        await check_urls([f"{scheme}://b/x"])
