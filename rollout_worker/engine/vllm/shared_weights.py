"""Weights of one version in memory that the engine's processes share.

    rollout worker: write() ──► SharedWeights (sealed) ──► path ──► each rank: read() ──► tensors

The memory has no name in any file system (memfd, Linux): it is freed with the last process that
uses it, however that process ends, and it cannot be changed once it is written.
"""

import fcntl
import itertools
import json
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.weights.wire.tensor_checksum import checksum
from paceline.weights.wire.weight_manifest import Manifest

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


def write(version: int, named: Iterable[tuple[str, Tensor]]) -> SharedWeights:
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
    value = {
        "path": f"/proc/{os.getpid()}/fd/{fd}",
        "manifest": manifest.to_json(),
        "checksum": found,
    }
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
