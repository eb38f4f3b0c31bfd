"""Weights of one version, staged for one rank: whole in memory that the ranks of a host share, and
the rank's slices of them on its device.

    rollout worker: share() ──► SharedWeights (sealed) ──► path ──► each rank: read() ──► tensors

The shared memory has no name in any file system (memfd, Linux): it is freed with the last process
that uses it, however that process ends, and it cannot be changed once it is written.

Once it is known which parts of the weights a rank copies (CopyPlan), it stages these alone. Before
that, and for models that have no plan, a rank among several stages nothing: vLLM's loaders take its
slices from host memory during the swap. An engine of one rank needs everything, and stages it
whole."""

import asyncio
import fcntl
import functools
import itertools
import json
import mmap
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.memory_plan import STAGED
from paceline.weights.tensor_checksum import checksum, weights_digest
from paceline.weights.weight_manifest import Manifest
from rollout_worker.engine.base import SwapFailed
from rollout_worker.engine.parameters import ParameterPart
from rollout_worker.engine.vllm.client import VLLMClient

_BUCKET_BYTES = 1 << 30
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_keys = itertools.count(1)


class Damaged(Exception):
    """The bytes differ from those that were written."""


@dataclass
class SharedWeights:
    """A rank reads it by its ``description`` while this process keeps it open. ``key``: unique
    within a process. The version is not: after a publisher's death the same version may come again
    with other weights."""

    key: int
    version: int
    description: str  # For ``read``. JSON: it passes through vLLM's own message encoding unchanged.
    _fd: int

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def share(version: int, named: Iterable[tuple[str, Tensor]]) -> SharedWeights:
    """Copies tensors of any device and layout. Blocks for as long as that takes."""
    tensors = [(name, tensor.detach()) for name, tensor in named]
    manifest = Manifest.of(tensors, bucket_bytes=_BUCKET_BYTES)
    name = f"paceline-weights-{version}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        size = max(manifest.total_bytes, 1)
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as memory:
            flat = torch.frombuffer(memory, dtype=torch.uint8)[: manifest.total_bytes]
            views = manifest.views(flat)
            for spec, (name, tensor) in zip(manifest.specs, tensors, strict=True):
                if not spec.same_as and tensor.numel():
                    views[name].copy_(tensor)
            found = checksum(flat)
            # The mapping can be closed, and the memory sealed, once no tensor refers to it.
            del views, flat
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    path = f"/proc/{os.getpid()}/fd/{fd}"
    value = {"path": path, "manifest": manifest.to_json(), "checksum": found}
    return SharedWeights(next(_keys), version, json.dumps(value), fd)


def read(description: str) -> dict[str, Tensor]:
    """The tensors, in shared memory: not to be written to. Raises Damaged."""
    value = json.loads(description)
    fd = os.open(value["path"], os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        # Private: torch takes writable memory only, and a write must never reach other ranks.
        memory = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    manifest = Manifest.from_json(value["manifest"], limit_bytes=1 << 60)
    if manifest.total_bytes > size:
        raise Damaged(f"{size} bytes of weights where {manifest.total_bytes} were announced")
    flat = torch.frombuffer(memory, dtype=torch.uint8)[: manifest.total_bytes]
    if checksum(flat) != value["checksum"]:
        raise Damaged("the weights do not match their checksum")
    return manifest.views(flat)


_STAGE_S = 600.0  # Longest wait for the ranks. Seconds.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.005, 0.2  # Interval of questions: each comes between two steps


async def stage(client: VLLMClient, weights: SharedWeights) -> None:
    """Returns once every rank has staged the weights. Raises SwapFailed, and then no rank keeps
    them; EngineError if the engine has ended."""
    await client.ranks("paceline_stage", weights.key, weights.description)
    end, pause_s = time.monotonic() + _STAGE_S, _FIRST_LOOK_S
    while None in (found := await client.ranks("paceline_staged", weights.key)):
        if time.monotonic() > end:
            missing = [rank for rank, error in enumerate(found) if error is None]
            found = [f"ranks {missing} did not answer"]
            break
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LAST_LOOK_S)
    if errors := list(filter(None, found)):
        await client.ranks("paceline_drop", weights.key)
        raise SwapFailed(f"weights {weights.version} not staged: {errors[0]}")


Place = tuple[str, int, tuple[int, ...], tuple[int, ...]]
"""A part of a weight: name, offset, size, stride."""
Key = tuple[str, int, tuple[int, ...], tuple[int, ...], int]
Views = dict[Key, Tensor]
"""Target memory by part of a weight (name, offset, size, stride) and target address: tied
parameters get the same weight."""


@dataclass(frozen=True)
class RankWeights:
    tensors: Mapping[str, Tensor]  # Whole, by name, row-major; not to be written to
    slices: Mapping[Place, Tensor] = field(default_factory=dict)
    """The parts of them that are on the device; none if it has no room, or without a plan."""
    host: Mapping[str, Tensor] | None = None
    """``tensors`` in host memory, if they are copies on the device."""

    def off_device(self) -> "RankWeights":
        return RankWeights(self.host or self.tensors)

    def part(self, place: Place) -> Tensor:
        if (staged := self.slices.get(place)) is not None:
            return staged
        name, offset, size, stride = place
        whole = self.tensors[name]
        return whole.as_strided(size, stride, whole.storage_offset() + offset)

    def parts(self, views: Views) -> list[ParameterPart]:
        """The recorded copies, with what they should have copied."""
        return [ParameterPart(key[0], memory, self.part(key[:4])) for key, memory in views.items()]


class CopyPlan:
    """The copies of recorded ``views``, for weights of the same names and shapes."""

    def __init__(self, views: Views) -> None:
        self.views = views
        self._memory = list(views.values())

    def reproduces(self, model: nn.Module, weights: RankWeights) -> bool:
        """True if the copies give the same parameters as the loaders just did, bit by bit. If
        False, the model's weights are undefined."""
        expected = weights_digest(model.named_parameters())
        for memory in self._memory:
            memory.fill_(float("nan"))
        self.apply(weights)
        return bool(weights_digest(model.named_parameters()) == expected)

    def apply(self, weights: RankWeights) -> None:
        sources = [weights.part(key[:4]) for key in self.views]
        torch._foreach_copy_(self._memory, sources, non_blocking=True)


_Name = TypeVar("_Name", str, Place)


def stage_for(
    device: torch.device, tensors: Mapping[str, Tensor], plan: CopyPlan | None, *, ranks: int
) -> RankWeights:
    """``ranks``: of the engine."""
    whole = RankWeights(tensors)
    if plan is not None:
        parts = {key[:4]: whole.part(key[:4]) for key in plan.views}
        return RankWeights(tensors, _on(device, parts) or {})
    moved = _on(device, tensors) if ranks == 1 else None
    return RankWeights(moved, host=tensors) if moved else whole


def _on(device: torch.device, tensors: Mapping[_Name, Tensor]) -> dict[_Name, Tensor] | None:
    """Copies on the device, if it has room for them besides the engine."""
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if device.type != "cuda":
        return {name: tensor.clone() for name, tensor in tensors.items()}
    free, _ = torch.cuda.mem_get_info(device)
    stream = _stream(device)
    # What torch keeps of the versions before is room, too: on one stream it is used again. What it
    # keeps for the engine is not: the engine's next long prompt needs it.
    kept = (s for s in torch.cuda.memory_snapshot() if s["stream"] == stream.cuda_stream)
    free += sum(segment["total_size"] - segment["allocated_size"] for segment in kept)
    if size > free * STAGED:
        return None
    try:
        with torch.cuda.stream(stream):
            moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    except torch.OutOfMemoryError:  # it keeps it for something else
        return None
    stream.synchronize()
    return moved


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """A separate stream: on the engine's, the copies would delay its kernels."""
    return torch.cuda.Stream(device)
