"""Sizes of GPUs, by name or as found on this machine."""

import re
from dataclasses import dataclass

from paceline.errors import BadInput

GIB = 1 << 30
GPUS = {
    "l4-24g": 22.0,
    "a10-24g": 22.0,
    "rtx4090-24g": 23.5,
    "l40s-48g": 44.4,
    "a100-40g": 39.4,
    "a100-80g": 79.1,
    "h100-80g": 79.1,
    "h800-80g": 79.1,
    "h20-96g": 95.0,
    "h200-141g": 139.8,
    "b200-180g": 178.0,
}
"""GiB that CUDA reports, below the size in the name, rounded down."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    bytes: int


def named_gpu(name: str) -> Gpu:
    """A GPU of the list, also without the size in its name, or ``NNg`` for one of so many GiB.
    Raises BadInput."""
    known = [full for full in GPUS if name in (full, full.rpartition("-")[0])]
    if len(known) == 1:
        return Gpu(known[0], int(GPUS[known[0]] * GIB))
    if size := re.fullmatch(r"([1-9][0-9]{0,3})g", name):
        return Gpu(name, int(size[1]) * GIB)
    names = " or ".join(known) or f"one of {', '.join(GPUS)}, or its size in GiB, as in 80g"
    raise BadInput(f"--gpu {name}: give {names}")


def found_gpu() -> Gpu | None:
    """The smallest GPU that torch sees on this machine; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    seen = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    least = min(seen, key=lambda one: one.total_memory)
    return Gpu(least.name, least.total_memory)
