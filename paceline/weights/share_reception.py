"""Reception of shares: the buckets that each source of a link sends, into one buffer, all sources
at once.

source 0 ── buckets 0, n, ... ──► thread ─┐ checked against their checksums
source 1 ── buckets 1, n + 1, ... ► thread ─┴──► ArrivingWeights
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.process import threads
from paceline.weights.arriving_weights import ArrivingWeights, ReceiverBase
from paceline.weights.bucket_delta import WORTH, apply_delta
from paceline.weights.link_messages import ENDS, PATIENCE, PUBLISHER, WHOLE, recv_record
from paceline.weights.tensor_checksum import checksum
from paceline.weights.weight_manifest import Manifest, WeightsRefused

T = TypeVar("T")


@dataclass(frozen=True)
class Coming:
    """Buckets that one source is about to send."""

    mesh: ProcessMesh
    buckets: Sequence[int]
    base: ReceiverBase | None
    heard: Callable[[], None]
    done: Callable[[], None]
    direct: bool
    """From its device to this one."""


def receive_shares(weights: ArrivingWeights, coming: Sequence[Coming]) -> bool:
    """Fills ``weights``; False if the only source will never have the rest."""
    try:
        whole = all(at_once(coming, lambda one: _receive_buckets(weights, one)))
        if not whole and len(coming) > 1:
            # Ranks of a replica hold all of a version before they send any of it.
            raise WeightsRefused(f"a rank ended version {weights.version} in the middle")
        return whole
    except Exception:
        if not all(one.mesh.settled for one in coming):
            weights.leave_memory()
        raise


def receive_direct(
    version: int, manifest: Manifest, flat: Tensor, coming: Sequence[Coming]
) -> None:
    """Fills ``flat`` from the sources' devices."""
    at_once(coming, lambda one: _receive_direct(version, manifest, flat, one))


def at_once(coming: Sequence[Coming], work: Callable[[Coming], T]) -> list[T]:
    """Results of ``work`` for all sources. The first failure ends the other meshes."""
    if len(coming) == 1:
        return [work(coming[0])]

    def run(one: Coming, ended: Future[T]) -> None:
        try:
            ended.set_result(work(one))
        except Exception as error:
            ended.set_exception(error)

    results = [Future[T]() for _ in coming]
    for place, given in enumerate(zip(coming, results, strict=True)):
        threads.start(run, f"receive-source-{place}", given)
    ended, rest = wait(results, return_when=FIRST_EXCEPTION)
    if failure := next(filter(None, (result.exception() for result in ended)), None):
        for one in coming:
            one.mesh.abandon()
        wait(rest)
        raise failure
    return [result.result() for result in results]


def _receive_buckets(weights: ArrivingWeights, coming: Coming) -> bool:
    """Each bucket is checked while the next one arrives."""
    checked: Future[None] | None = None
    with ThreadPoolExecutor(1, "weights-check") as checking:
        for i in coming.buckets:
            size, expected = _recv_record(coming)
            if size == ENDS:
                return False
            delta = _recv_bucket(coming, weights.bucket(i), size)
            coming.heard()
            if checked is not None:
                checked.result()
            checked = checking.submit(_check, weights, i, expected, delta, coming.base)
        coming.done()
        if checked is not None:
            checked.result()
    return True


def _recv_record(coming: Coming) -> tuple[int, str]:
    while (record := recv_record(coming.mesh))[0] == PATIENCE:
        coming.heard()
    return record


def _recv_bucket(coming: Coming, bucket: Tensor, size: int) -> Tensor | None:
    """Receives a whole bucket into its place, or returns the delta that came in its stead."""
    if size == WHOLE:
        coming.mesh.recv(bucket, PUBLISHER)
        return None
    if coming.base is None or not 0 < size <= WORTH * bucket.numel():
        raise WeightsRefused(f"a delta of {size} bytes for a bucket of {bucket.numel()}")
    delta = torch.empty(size, dtype=torch.uint8)
    coming.mesh.recv(delta, PUBLISHER)
    return delta


def _check(
    weights: ArrivingWeights,
    index: int,
    expected: str,
    delta: Tensor | None,
    base: ReceiverBase | None,
) -> None:
    bucket = weights.bucket(index)
    if delta is not None and base is not None:
        bucket.copy_(weights.manifest.bucket(base.flat, index))
        apply_delta(bucket, delta)
    _compare(weights.version, index, bucket, expected)
    weights.add(index, expected, delta)


def _receive_direct(version: int, manifest: Manifest, flat: Tensor, coming: Coming) -> None:
    """One bucket is checked while the next one arrives."""
    before: tuple[int, Tensor, str] | None = None
    for i in coming.buckets:
        (size, expected), bucket = _recv_record(coming), manifest.bucket(flat, i)
        if size != WHOLE:
            raise WeightsRefused("a bucket between devices travels whole")
        receiving = coming.mesh.recv_async(bucket, PUBLISHER)
        if before is not None:
            _compare(version, *before)
        coming.mesh.wait(receiving)
        coming.heard()
        before = i, bucket, expected
    coming.done()
    if before is not None:
        _compare(version, *before)


def _compare(version: int, index: int, bucket: Tensor, expected: str) -> None:
    if checksum(bucket) != expected:
        raise WeightsRefused(f"bucket {index} of version {version} was damaged on the way")
