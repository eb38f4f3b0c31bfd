"""Publication of weights: what it takes from training, and the rate at which buckets reach the
host."""

import statistics
import time
from typing import Any

import torch

from benchmarks.gpu_check.models import Shape, make_model
from paceline.weights.weight_snapshot import SnapshotPool, WeightSnapshot, WireDtype

VERSIONS = 3


def publication(device: torch.device, shape: Shape) -> dict[str, Any]:
    """Snapshots in bfloat16. The training thread is held while it starts the copy, not while the
    device makes it."""
    model = make_model(shape, device)
    pool, wire = SnapshotPool(), WireDtype(torch.bfloat16)
    held, copied, rates = [], [], []
    for version in range(VERSIONS):
        begun = time.perf_counter()
        snapshot = WeightSnapshot.take(version, model.named_parameters(), pool, wire=wire)
        held.append(time.perf_counter() - begun)
        snapshot.wait_ready()
        copied.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        for index in range(snapshot.manifest.buckets):
            snapshot.bucket(index).cpu()
        rates.append(snapshot.manifest.total_bytes / (time.perf_counter() - begun))
        size = snapshot.manifest.total_bytes
        del snapshot
    return {
        "model": shape.name,
        "GB": size / 1e9,
        "held by training, ms": statistics.median(held[1:]) * 1e3,
        "snapshot complete, ms": statistics.median(copied[1:]) * 1e3,
        "to the host, GB/s": statistics.median(rates[1:]) / 1e9,
    }
