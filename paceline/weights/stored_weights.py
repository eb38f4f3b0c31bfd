"""Stored weights: writing of published snapshots to the weight store, and reading of them.

Each bucket is there whole, and also as what changed since the version before, if that is much less.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.ids import stored_version
from paceline.mesh.elastic_mesh import EpochCancelled
from paceline.payloads.store import StoreUnavailable
from paceline.process import threads
from paceline.process.compute_device import stream_of_its_own
from paceline.process.structured_log import event, first_line
from paceline.process.waits import WaitKind, waiting
from paceline.weights.arriving_weights import ArrivingWeights
from paceline.weights.bucket_delta import apply_delta
from paceline.weights.tensor_checksum import checksum
from paceline.weights.weight_manifest import WHOLE_SHARE, Manifest, WeightsRefused
from paceline.weights.weight_snapshot import WeightSnapshot
from paceline.weights.weight_store import MANIFEST, THE_STORE, WeightStore, digest_of, prefix_of
from paceline.weights.weight_transfer import StagedWeights, memory_bytes

T = TypeVar("T")
_log = logging.getLogger(__name__)

AT_ONCE = 8
"""Buckets that are written or read at the same time: as many more copies are in host memory."""
RETRY_S = 1.0
"""Time after which a store that failed, or has not yet what is waited for, is asked again."""
_Row = tuple[str, bool]
"""A bucket in the manifest: its checksum, and whether there is a delta of it."""


class StoreWriter:
    """One rank's writer of what its replica publishes, one version after the other."""

    def __init__(
        self,
        store: WeightStore,
        replica: str,
        device: torch.device,
        on_stored: Callable[[], None] = lambda: None,
    ) -> None:
        """``replica``: a name that is equal on all ranks of a replica and of no other one.
        ``on_stored``: called from the writer's thread when a version is complete."""
        self._store, self._replica, self._device = store, replica, device
        self._on_stored = on_stored
        self._writing: WeightSnapshot | None = None
        self._changed = threading.Condition()
        self._publication = 0  # That is stored
        self.stored = ""
        """Name of the newest version that is complete in the store; empty for none."""

    @property
    def busy(self) -> bool:
        return self._writing is not None

    def write(self, snapshot: WeightSnapshot) -> None:
        """Writes the snapshot in the background. On rank 0 none may be under way."""
        self._writing = snapshot
        threads.start(self._write, f"store-weights-{snapshot.version}", [snapshot])

    def forget(self) -> None:
        """Nobody is to have what is being written, or was."""
        with self._changed:
            self._writing, self.stored = None, ""
            self._changed.notify_all()

    def _write(self, snapshot: WeightSnapshot) -> None:
        started, source = time.perf_counter(), snapshot.share.source
        prefix = f"{snapshot.version}-{self._replica}-{snapshot.publication}"

        def write_all() -> tuple[list[_Row], bytes]:
            with stream_of_its_own(self._device):
                rows = self._write_buckets(snapshot, prefix)
            summary = self._manifest(snapshot, prefix, rows) if source == 0 else _json(rows)
            self._put(snapshot, prefix, {f"part{source}" if source else MANIFEST: summary})
            return rows, summary

        try:
            rows, summary = self._insist(snapshot, write_all)
        except EpochCancelled:
            return
        with self._changed:
            if self._writing is not snapshot:
                return
            self._writing, self._publication = None, snapshot.publication
            self.stored = "" if source else f"{prefix}-{digest_of(summary)}"
        ms = (time.perf_counter() - started) * 1e3
        event(_log, "weights stored", version=snapshot.version, buckets=len(rows), ms=ms)
        self._on_stored()

    def _write_buckets(self, snapshot: WeightSnapshot, prefix: str) -> list[_Row]:
        base, rows = snapshot.base, list[_Row]()
        snapshot.wait_ready()
        for some in _slices(snapshot.share.buckets(snapshot.manifest)):
            deltas = {i: snapshot.delta(i, base) for i in some if base is not None}
            objects = {f"b{i}": _bytes(snapshot.bucket(i)) for i in some}
            objects |= {f"d{i}": _bytes(delta) for i, delta in deltas.items() if delta is not None}
            self._put(snapshot, prefix, objects)
            rows += [(snapshot.checksum(i), deltas.get(i) is not None) for i in some]
        return rows

    def _manifest(self, snapshot: WeightSnapshot, prefix: str, own: Sequence[_Row]) -> bytes:
        """The manifest, once all ranks have written their shares."""
        sources, base = snapshot.share.sources, snapshot.base
        rows: list[_Row] = [("", False)] * snapshot.manifest.buckets
        rows[::sources] = own
        for source in range(1, sources):
            part = self._insist(snapshot, partial(self._store.first, prefix, f"part{source}"))
            rows[source::sources] = json.loads(part)
        known = base is not None and base.publication == self._publication
        named = {"base": self.stored if known else "", "buckets": rows}
        return _json({"manifest": snapshot.manifest.to_json(), **named})

    def _put(self, snapshot: WeightSnapshot, prefix: str, objects: dict[str, bytes]) -> None:
        self._insist(snapshot, partial(self._store.write, prefix, objects))

    def _insist(self, snapshot: WeightSnapshot, act: Callable[[], T | None]) -> T:
        """The result of ``act``, which is called until it has one. Raises EpochCancelled once the
        snapshot is nobody's any more."""
        since: float | None = None
        while self._writing is snapshot:
            what = f"writing weights {snapshot.version}"
            try:
                if (result := act()) is not None:
                    return result
            except StoreUnavailable as error:
                event(_log, "weights not stored yet", logging.WARNING, error=error)
                what = f"{what}: {error}"
            except EpochCancelled:
                raise
            except Exception as error:
                # Such as no memory for a delta. No other thread would write these weights, and
                # later ones wait for them.
                _log.exception("weights %d not stored yet", snapshot.version)
                what = f"{what}: {first_line(error)}"
            since = since or time.monotonic()
            with waiting(WaitKind.STORE, what, THE_STORE, since=since), self._changed:
                self._changed.wait_for(lambda: self._writing is not snapshot, RETRY_S)
        raise EpochCancelled("the weights were taken back")


def read_weights(
    store: WeightStore,
    name: str,
    here: dict[str, ArrivingWeights],
    device: torch.device,
    over: Callable[[], bool] = lambda: False,
    on_arrival: Callable[[], None] = lambda: None,
) -> StagedWeights:
    """Reads the weights of this name, and stages them on ``device``.

    ``here``: by name, weights that were read before, and those that have begun to come, which this
    adds. It goes on with what is here, and reads only what changed since others that are.
    ``over``: whether they are wanted no more; then EpochCancelled is raised. ``on_arrival``: called
    before the memory for them is taken, once the store has shown that they are there. Raises
    StoreUnavailable, or WeightsRefused if an object is missing or damaged."""
    started, prefix = time.perf_counter(), prefix_of(name)
    raw = store.first(prefix, MANIFEST)
    if raw is None or digest_of(raw) != name.rpartition("-")[2]:
        raise WeightsRefused(f"the manifest of {name} is {'damaged' if raw else 'not there'}")
    said = json.loads(raw)
    manifest = Manifest.from_json(said["manifest"], limit_bytes=memory_bytes(device))
    rows: Sequence[_Row] = said["buckets"]
    base = here.get(said["base"])
    if name not in here:
        on_arrival()
        here[name] = ArrivingWeights(stored_version(name), manifest)
    weights = here[name]
    held, _ = weights.held_of(WHOLE_SHARE)
    for some in _slices(sorted(set(range(manifest.buckets)) - set(held))):
        if over():
            raise EpochCancelled("other weights are wanted")
        bases = {i: base if rows[i][1] else None for i in some}
        objects = [f"b{i}" if of is None else f"d{i}" for i, of in bases.items()]
        for i, data in zip(some, store.read(prefix, objects), strict=True):
            _add(weights, i, rows[i][0], data, bases[i])
    tensors, seconds = manifest.views(weights.flat.to(device)), time.perf_counter() - started
    return StagedWeights(weights.version, tensors, seconds)


def _add(
    weights: ArrivingWeights,
    index: int,
    expected: str,
    data: bytes | None,
    base: ArrivingWeights | None,
) -> None:
    """Adds a bucket that matches its checksum. ``data``: the bucket, or its changes since
    ``base``."""
    bucket, what = weights.bucket(index), f"bucket {index} of version {weights.version}"
    if not data:
        raise WeightsRefused(f"{what} is not in the store")
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if base is None and raw.numel() != bucket.numel():
        raise WeightsRefused(f"{what} is damaged in the store: it has {raw.numel()} bytes")
    bucket.copy_(raw if base is None else base.bucket(index))
    if base is not None:
        apply_delta(bucket, raw)
    if checksum(bucket) != expected:
        raise WeightsRefused(f"{what} is damaged in the store")
    weights.add(index, expected, None)


def _slices(indices: Sequence[int]) -> Iterator[Sequence[int]]:
    return (indices[at : at + AT_ONCE] for at in range(0, len(indices), AT_ONCE))


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.cpu().numpy())


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
