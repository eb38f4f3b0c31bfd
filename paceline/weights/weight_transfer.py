"""Weight transfer over a link: the receiving of weights, by the messages of ``link_messages``.

A link has one or more sources: the ranks of the replica that publishes, of which each holds a share
of the buckets, or a rollout worker that relays what it receives. Each is rank 0 of a mesh with the
receiver. If a source holds the same base as the receiver, the weights of an earlier version, a
bucket may travel as a delta (see bucket_delta).

Invariants:

- What is sent never changes: it is the state at one version, whatever the trainer does. All sources
  send what was published at once: a publication has a number of its own.
- Staged weights are complete and intact, or the transfer raises and there are none. Every bucket is
  compared with the trainer's checksum of the whole bucket, however and over however many relays it
  travelled.
- A transfer that breaks off goes on at the missing buckets over the next link, if each of that
  link's sources has the same checksums for those that are here. If not, it begins anew.
- No size from a message is used before it was checked.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.process import threads
from paceline.weights.arriving_weights import ArrivingWeights
from paceline.weights.bucket_delta import WORTH, apply_delta
from paceline.weights.link_messages import (
    ENDS,
    PATIENCE,
    PUBLISHER,
    WHOLE,
    Answer,
    Ask,
    check_protocol,
    publication_in,
    recv_answer,
    recv_frame,
    recv_record,
    send_frame,
    version_in,
)
from paceline.weights.tensor_checksum import checksum
from paceline.weights.weight_manifest import Manifest, WeightShard, WeightsRefused

T = TypeVar("T")

_HEADER_FRAME = 128 << 20


@dataclass(frozen=True)
class StagedWeights:
    """Weights of one version: ``tensors`` by name, on the receiver's device, never written to."""

    version: int
    tensors: dict[str, Tensor]
    seconds: float = 0.0
    base: ArrivingWeights | None = None
    """The same weights as a base for the next version; None if deltas of their types are not worth
    it."""


@dataclass(frozen=True)
class Coming:
    """Buckets that one source is about to send."""

    mesh: ProcessMesh
    buckets: Sequence[int]
    base: ArrivingWeights | None
    heard: Callable[[], None]
    done: Callable[[], None]


@dataclass
class Reception:
    """State that a receiver keeps from one link to the next, and its callbacks."""

    begun: ArrivingWeights | None = None
    tree: int = 0
    keep_deltas: bool = False
    began: Callable[[ArrivingWeights], None] = field(default=lambda weights: None)
    """Called when a transfer begins or goes on. From then on the weights fill up."""
    heard: Callable[[int], None] = field(default=lambda source: None)
    """Called for everything that comes from a source, and when it is asked for something."""
    paid: Callable[[int], None] = field(default=lambda source: None)


def receive_snapshot(
    sources: Sequence[ProcessMesh],
    *,
    newer_than: int = -1,
    base: ArrivingWeights | None = None,
    limit_bytes: int | None = None,
    device: torch.device | None = None,
    reception: Reception | None = None,
) -> StagedWeights:
    """Receiver: waits for the next version and stages it in fresh memory.

    ``sources``: the meshes with all sources of the link. ``newer_than``: any version up to this is
    refused. ``base``: what is here. ``limit_bytes``: largest buffer to allocate; default: the
    device's whole memory. ``device``: where the tensors are staged; default: the mesh's. Call
    acknowledge() for each source once the engine holds it.

    Raises EpochCancelled, MeshError, or WeightsRefused: old version, malformed, too large, or a
    bucket that does not match its checksum. What has come until then is in ``reception.begun``.
    """
    reception, device = reception or Reception(), device or sources[0].device
    while True:
        header = recv_frame(sources[0], PUBLISHER, _HEADER_FRAME)
        reception.heard(0)
        check_protocol(header, "publisher", "receiver")
        if header.get("waits") is True:
            continue
        started = time.perf_counter()
        ask = Ask(version_in(header), publication_in(header))
        if ask.version <= newer_than:
            raise WeightsRefused(f"version {ask.version} was offered, {newer_than} is here already")
        limit = limit_bytes or memory_bytes(device)
        manifest = Manifest.from_json(header.get("manifest"), limit_bytes=limit)
        here = base if base is not None and base.manifest == manifest else None
        begun = reception.begun
        if begun is not None and (begun.version, begun.manifest) != (ask.version, manifest):
            begun = None
        coming, begun = _negotiate(sources, ask, manifest, here, begun, reception)
        if not coming:
            # A version that was published since: it is announced next.
            continue
        deltas = reception.keep_deltas
        weights = begun or ArrivingWeights(ask.version, manifest, keep_deltas=deltas)
        staged = _stage_shares(weights, coming, device, reception)
        if staged is not None:
            return replace(staged, seconds=time.perf_counter() - started)


def _negotiate(
    sources: Sequence[ProcessMesh],
    ask: Ask,
    manifest: Manifest,
    base: ArrivingWeights | None,
    begun: ArrivingWeights | None,
    reception: Reception,
) -> tuple[list[Coming], ArrivingWeights | None]:
    """Asks all sources for their shares; nothing comes if one of them will never have the version.
    Then the weights that have ``begun`` to come, if all sources go on with them."""
    weights = begun if begun is not None and begun.held else None
    answers = _ask_all(sources, ask, base, weights, reception)
    if weights is not None and not all(answer.kept for answer in answers if answer.ready):
        weights = None
        answers = _ask_all(sources, ask, base, None, reception)
    ready = all(answer.ready for answer in answers)
    for source, mesh in enumerate(sources):
        send_frame(mesh, {"go": ready}, PUBLISHER)  # or it is to forget this version
        if not ready:
            reception.paid(source)
    if not ready:
        return [], None
    if base is None and any(answer.base for answer in answers):
        raise WeightsRefused("deltas were announced for weights that are not here")
    coming = []
    for source, (mesh, answer) in enumerate(zip(sources, answers, strict=True)):
        share = WeightShard(source, len(sources))
        here = set() if weights is None else set(weights.held_of(share)[0])
        missing = [i for i in share.buckets(manifest) if i not in here]
        heard, paid = partial(reception.heard, source), partial(reception.paid, source)
        deltas = base if answer.base else None
        coming.append(Coming(mesh, missing, deltas, heard, paid))
    return coming, weights


def _stage_shares(
    weights: ArrivingWeights, coming: Sequence[Coming], device: torch.device, reception: Reception
) -> StagedWeights | None:
    """The weights from host memory; None if the only source will never have the rest of them."""
    reception.begun = weights
    weights.tree = reception.tree
    if base := next((share.base for share in coming if share.base), None):
        weights.base = base.fingerprint_of()
    reception.began(weights)
    if not receive_shares(weights, coming):
        return None
    reception.begun = None
    manifest = weights.manifest
    kept = weights if manifest.may_be_sparse else None
    return StagedWeights(weights.version, manifest.views(weights.flat.to(device)), base=kept)


def _ask_all(
    sources: Sequence[ProcessMesh],
    ask: Ask,
    base: ArrivingWeights | None,
    weights: ArrivingWeights | None,
    reception: Reception,
) -> list[Answer]:
    for source, mesh in enumerate(sources):
        share = WeightShard(source, len(sources))
        have, fingerprint = ([], "") if weights is None else weights.held_of(share)
        held = "" if base is None else base.fingerprint_of(share)
        mine = replace(ask, have=tuple(have), have_fingerprint=fingerprint, base=held)
        send_frame(mesh, asdict(mine), PUBLISHER)
    answers = []
    for source, mesh in enumerate(sources):
        reception.heard(source)
        while (answer := recv_answer(mesh)) is None:
            reception.heard(source)
        # It waits for the answers of the others now.
        reception.paid(source)
        answers.append(answer)
    for source in range(len(sources)):
        reception.heard(source)
    return answers


def memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# ---- shares, from all sources at once


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
    base: ArrivingWeights | None,
) -> None:
    bucket = weights.bucket(index)
    if delta is not None and base is not None:
        bucket.copy_(weights.manifest.bucket(base.flat, index))
        apply_delta(bucket, delta)
    if checksum(bucket) != expected:
        raise WeightsRefused(f"bucket {index} of version {weights.version} was damaged on the way")
    weights.add(index, expected, delta)
