"""Weights through a store: what a reader takes is what was published, whatever becomes of the
writer and of the store."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import EpochCancelled
from paceline.payloads.store import StoreUnavailable
from paceline.process import waits
from paceline.v1 import worker_pb2
from paceline.weights.arriving_weights import ArrivingWeights
from paceline.weights.stored_weights import StoreWriter, read_weights
from paceline.weights.weight_manifest import Manifest, WeightShard, WeightsRefused
from paceline.weights.weight_snapshot import WeightSnapshot
from paceline.weights.weight_store import THE_STORE, WeightStore, prefix_of
from rollout_worker import store_receiver
from rollout_worker.store_receiver import StoreReceiver
from rollout_worker.weight_receiver import NotLoaded
from testbed.patience import until
from tests.fixtures.train_states import assert_same_bits

CPU = torch.device("cpu")
REPLICA = "0123456789ab"
BUCKET = 1024
BUCKETS = 4


class CountingStore(WeightStore):
    """A store on a real file system that counts what is read, and can fail."""

    def __init__(self, where: Path) -> None:
        super().__init__(f"file://{where}", "run")
        self.read_objects: list[str] = []
        self.writes = 0
        self.dies_at = -1
        self.down = False

    def write(self, prefix: str, objects: Mapping[str, bytes]) -> int:
        for name, data in objects.items():
            if self.dies_at == self.writes:
                raise EpochCancelled("the process is killed")
            if self.down:
                raise StoreUnavailable("down")
            self.writes += super().write(prefix, {name: data})
        return len(objects)

    def read(self, prefix: str, names: Sequence[str]) -> Sequence[bytes | None]:
        if self.down:
            raise StoreUnavailable("down")
        self.read_objects += [f"{prefix}.{name}" for name in names]
        return super().read(prefix, names)

    def prefixes(self) -> set[str]:
        return {ref[0].partition(".")[0] for ref in asyncio.run(self._objects.list())}

    def delete(self, name: str, part: str) -> None:
        asyncio.run(self._objects.delete([self.ref(name, part)]))

    def damage(self, name: str, part: str, data: bytes) -> None:
        asyncio.run(self._objects.put({self.ref(name, part): data}))

    @staticmethod
    def ref(name: str, part: str) -> Any:
        return f"{prefix_of(name)}.{part}", 0


def weights(version: int) -> dict[str, Tensor]:
    """Of which a few words differ from one version to the next."""
    generator = torch.Generator().manual_seed(0)
    found = {n: torch.randn(32, 32, generator=generator).to(torch.bfloat16) for n in ("a", "b")}
    found["a"][version % 32, 0] += 1
    return found


def snapshot(version: int, before: WeightSnapshot | None = None) -> WeightSnapshot:
    taken = WeightSnapshot.take(version, weights(version).items(), bucket_bytes=BUCKET)
    taken.publication = version + 1
    taken.follow(before)
    return taken


def written(writer: StoreWriter, taken: WeightSnapshot) -> str:
    writer.write(taken)
    until(lambda: not writer.busy, 60.0)
    return writer.stored


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path)


@pytest.fixture
def writer(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> StoreWriter:
    monkeypatch.setattr("paceline.weights.stored_weights.RETRY_S", 0.02)
    return StoreWriter(store, REPLICA, CPU)


def test_every_bit_that_was_published_is_read(store: CountingStore, writer: StoreWriter) -> None:
    name = written(writer, snapshot(3))
    assert name.startswith(f"3-{REPLICA}-4-")
    staged = read_weights(store, name, {}, CPU)
    assert staged.version == 3
    assert_same_bits(staged.tensors, weights(3))


def test_who_has_the_version_before_reads_what_changed(
    store: CountingStore, writer: StoreWriter
) -> None:
    first = snapshot(1)
    old = written(writer, first)
    new = written(writer, snapshot(2, first))
    here: dict[str, Any] = {}
    read_weights(store, old, here, CPU)
    store.read_objects.clear()
    assert_same_bits(read_weights(store, new, here, CPU).tensors, weights(2))
    assert [n.rpartition(".")[2] for n in store.read_objects] == [
        "manifest",
        "d0",
        "d1",
        "d2",
        "d3",
    ]
    # Another base is none.
    store.read_objects.clear()
    assert_same_bits(read_weights(store, new, {"x": here[old]}, CPU).tensors, weights(2))
    assert [n.rpartition(".")[2] for n in store.read_objects][1:] == ["b0", "b1", "b2", "b3"]


def test_ranks_write_their_shares_and_the_first_the_manifest(
    store: CountingStore, writer: StoreWriter
) -> None:
    """The ranks are done in any order."""
    whole = snapshot(5)
    ranks = [writer, *(StoreWriter(store, REPLICA, CPU) for _ in range(2))]
    for rank in (0, 2, 1):
        share = WeightShard(rank, 3)
        flat = torch.cat([whole.bucket(i) for i in share.buckets(whole.manifest)])
        part = WeightSnapshot(5, whole.manifest, flat, share=share)
        part.publication = 6
        ranks[rank].write(part)
    until(lambda: not any(rank.busy for rank in ranks), 60.0)
    assert_same_bits(read_weights(store, writer.stored, {}, CPU).tensors, weights(5))
    assert [rank.stored for rank in ranks[1:]] == ["", ""]


@pytest.mark.parametrize("writes", range(BUCKETS + 1))
async def test_a_writer_killed_at_any_write_is_succeeded_and_swept(
    store: CountingStore, writer: StoreWriter, writes: int
) -> None:
    """Of ``BUCKETS`` buckets and a manifest."""
    store.dies_at = writes
    await asyncio.to_thread(writer.write, snapshot(1))
    await asyncio.to_thread(until, lambda: store.writes == writes, 60.0)
    assert writer.stored == "", "a name is told before its manifest is there"
    store.dies_at = -1
    successor = StoreWriter(store, "ba9876543210", CPU)
    name = await asyncio.to_thread(written, successor, snapshot(1))
    staged = await asyncio.to_thread(read_weights, store, name, {}, CPU)
    assert_same_bits(staged.tensors, weights(1))
    await store.sweep(2, {prefix_of(name)})
    assert await asyncio.to_thread(store.prefixes) == {prefix_of(name)}


@pytest.mark.parametrize(
    ("part", "data"),
    [
        ("manifest", b""),
        ("manifest", b'{"manifest":'),
        ("manifest", None),
        ("b2", b"short"),
        ("b2", bytes(BUCKET)),
        ("b2", None),
    ],
)
def test_what_is_torn_damaged_or_gone_is_never_staged(
    store: CountingStore, writer: StoreWriter, part: str, data: bytes | None
) -> None:
    name = written(writer, snapshot(1))
    if data is None:
        store.delete(name, part)
    else:
        store.damage(name, part, data)
    with pytest.raises(WeightsRefused, match=r"damaged|not there|not in the store"):
        read_weights(store, name, {}, CPU)


def test_a_store_that_is_down_delays_the_writer_and_nobody_else(
    store: CountingStore, writer: StoreWriter
) -> None:
    store.down = True
    writer.write(snapshot(1))
    until(lambda: any(w.of == THE_STORE and "down" in w.what for w in waits.present(0.1)), 60.0)
    assert writer.busy and writer.stored == ""
    store.down = False
    until(lambda: not writer.busy, 60.0)
    assert_same_bits(read_weights(store, writer.stored, {}, CPU).tensors, weights(1))


def test_an_error_of_the_writer_delays_it(
    store: CountingStore, writer: StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as no memory on the device for what changed. Later versions wait for this one."""
    first, failures = snapshot(1), iter([torch.OutOfMemoryError("device")])
    written(writer, first)
    second = snapshot(2, first)
    delta = second.delta

    def fail(*given: Any) -> Any:
        for error in failures:
            raise error
        return delta(*given)

    monkeypatch.setattr(second, "delta", fail)
    assert_same_bits(read_weights(store, written(writer, second), {}, CPU).tensors, weights(2))


def test_weights_that_are_taken_back_while_they_are_written_get_no_name(
    store: CountingStore, writer: StoreWriter
) -> None:
    store.down = True
    writer.write(snapshot(1))
    writer.forget()
    store.down = False
    again = snapshot(1)
    again.publication = 9
    assert written(writer, again).startswith(f"1-{REPLICA}-9-")


def test_a_reader_goes_on_at_the_missing_bucket(
    store: CountingStore, writer: StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.weights.stored_weights.AT_ONCE", 1)
    name = written(writer, snapshot(1))
    here: dict[str, Any] = {}

    def over() -> bool:
        store.down = here[name].held == 2
        return False

    with pytest.raises(StoreUnavailable):
        read_weights(store, name, here, CPU, over)
    store.down = False
    store.read_objects.clear()
    staged = read_weights(store, name, here, CPU)
    assert_same_bits(staged.tensors, weights(1))
    assert [n.rpartition(".")[2] for n in store.read_objects] == ["manifest", "b2", "b3"]


def test_memory_for_a_version_is_taken_once_and_after_room_was_made(
    store: CountingStore, writer: StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Noted(ArrivingWeights):
        def __init__(self, *given: Any) -> None:
            done.append("taken")
            super().__init__(*given)

    def over() -> bool:
        store.down = done.count("taken") == 1 and not store.down
        return False

    monkeypatch.setattr("paceline.weights.stored_weights.ArrivingWeights", Noted)
    name = written(writer, snapshot(1))
    here: dict[str, Any] = {}
    with pytest.raises(StoreUnavailable):
        read_weights(store, name, here, CPU, over, lambda: done.append("room"))
    store.down = False
    read_weights(store, name, here, CPU, on_arrival=lambda: done.append("room"))
    assert done == ["room", "taken"]


class Reading:
    """A receiver of a rollout worker that reads from the store."""

    def __init__(self, store: WeightStore) -> None:
        self.loaded: list[int] = []
        self.tensors: Mapping[str, Tensor] = {}
        self.broken: list[int] = []
        self.arrived: list[str] = []
        self.not_loaded = 0
        self.receiver = StoreReceiver(
            store,
            url="",
            run_id="run",
            device=CPU,
            on_weights=self._load,
            on_link_error=lambda generation, why: self.broken.append(generation),
            on_arrival=lambda: self.arrived.append(self.receiver.reading),
        )

    def _load(self, staged: Any) -> None:
        if self.not_loaded:
            self.not_loaded -= 1
            raise NotLoaded("no memory")
        self.tensors = staged.tensors
        self.loaded.append(staged.version)

    def directed(self, stored: str, newest: int, **link: Any) -> None:
        self.receiver.name(stored)
        self.receiver.set_link(worker_pb2.WeightsLink(**{"epoch": 1, **link}), newest)

    def until(self, loaded: Sequence[int]) -> None:
        until(lambda: self.loaded == loaded, 60.0)


@pytest.fixture
def reading(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    monkeypatch.setattr(store_receiver, "RETRY_S", 0.02)
    made = Reading(store)
    yield made
    made.receiver.close()


def test_a_worker_that_slept_ten_versions_reads_the_newest_alone(
    store: CountingStore, writer: StoreWriter, reading: Reading
) -> None:
    reading.directed(written(writer, snapshot(0)), 0)
    reading.until([0])
    store.read_objects.clear()
    names = [written(writer, snapshot(version)) for version in range(1, 11)]
    asyncio.run(store.sweep(10, {prefix_of(names[-1])}))
    reading.directed(names[-1], 10)
    reading.until([0, 10])
    assert {name.partition("-")[0] for name in store.read_objects} == {"10"}
    assert_same_bits(reading.tensors, weights(10))


def test_weights_that_vanish_are_given_up_for_newer_ones(
    store: CountingStore, writer: StoreWriter, reading: Reading
) -> None:
    """They were deleted, because the leader did not know that this worker would read them."""
    old = written(writer, snapshot(1))
    asyncio.run(store.sweep(2, ()))
    reading.directed(old, 1)
    until(lambda: any(old.startswith(n.partition(".")[0]) for n in store.read_objects), 60.0)
    reading.directed(written(writer, snapshot(2)), 2)
    reading.until([2])
    assert reading.broken == []


def test_unreadable_weights_break_the_link_and_another_name_mends_it(
    store: CountingStore, writer: StoreWriter, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_receiver, "UNREADABLE_S", 0.1)
    bad = written(writer, snapshot(1))
    store.damage(bad, "b1", bytes(BUCKET))
    reading.directed(bad, 1)
    until(lambda: reading.broken == [1], 60.0)
    writer.forget()
    again = snapshot(1)
    again.publication = 7
    reading.directed(written(writer, again), 1, epoch=2)
    reading.until([1])
    assert_same_bits(reading.tensors, weights(1))


def test_a_store_that_is_down_breaks_no_link(
    store: CountingStore, writer: StoreWriter, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_receiver, "UNREADABLE_S", 0.0)
    name = written(writer, snapshot(1))
    store.down = True
    reading.directed(name, 1)
    until(lambda: reading.receiver.reading == name, 60.0)
    until(lambda: any(w.of == THE_STORE and "down" in w.what for w in waits.present(0.1)), 60.0)
    assert reading.arrived == [], "a version that waits for its turn makes room for none"
    store.down = False
    reading.until([1])
    assert reading.broken == [] and reading.receiver.reading == ""
    assert reading.arrived == [name]


def test_what_the_engine_does_not_take_is_offered_again(
    writer: StoreWriter, reading: Reading
) -> None:
    reading.not_loaded = 2
    reading.directed(written(writer, snapshot(1)), 1)
    reading.until([1])
    assert reading.broken == []


def test_a_version_that_was_never_committed_is_replaced_by_an_older_one(
    writer: StoreWriter, reading: Reading
) -> None:
    reading.directed(written(writer, snapshot(2)), 2)
    reading.until([2])
    writer.forget()
    reading.directed(written(writer, snapshot(1)), 1, epoch=2)
    reading.until([2, 1])
    # The same number comes again, with other bits under another name.
    again = snapshot(2)
    again.publication = 8
    reading.directed(written(writer, again), 2, epoch=2)
    reading.until([2, 1, 2])


def test_a_manifest_names_what_it_is_of(store: CountingStore, writer: StoreWriter) -> None:
    """Its form is that of links; the buckets' checksums stand beside it."""
    name = written(writer, snapshot(1))
    (raw,) = store.read(prefix_of(name), ["manifest"])
    assert raw is not None
    value = json.loads(raw)
    assert Manifest.from_json(value["manifest"], limit_bytes=1 << 20).buckets == BUCKETS
    assert value["base"] == "" and len(value["buckets"]) == BUCKETS
