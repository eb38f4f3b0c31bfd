"""Speed and memory of the trainer on one device: tokens per second, MFU, peak memory against the
plan, and what the publication of weights takes from training."""

import gc
import statistics
import time
from typing import Any

import torch

from benchmarks.gpu_check.models import (
    Shape,
    make_gradients,
    make_group,
    make_model,
    run_config,
    trained_tokens,
)
from paceline.config.schema import Config
from paceline.ids import Step, Version
from paceline.memory_plan import memory_plan
from paceline.model_shape import shape_of
from paceline.weights.weight_snapshot import SnapshotPool, WeightSnapshot, WireDtype
from policy_worker.objectives.batch import StepTotals

STEPS = 3
VERSIONS = 3
PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "H20": 148e12,
    "B200": 2250e12,
}
"""Dense bfloat16 operations per second that NVIDIA's data sheets state, by what the device's name
contains."""


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "flex attention": {"attention": "flex"},
    "compiled blocks": {"compiled": True},
    "offloaded activations": {"offload_activations": True},
}
"""Settings of the trainer that change its speed and memory alone."""


def trainer_speed(
    device: torch.device, shape: Shape, row_tokens: int, option: str = "defaults"
) -> dict[str, Any]:
    """Steps of one row each: forward, loss, backward, clip, AdamW. ``option``: one of OPTIONS."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    model = make_model(shape, device)
    config = run_config("bfloat16", row_tokens, **OPTIONS[option])
    gradients = make_gradients(model, config, device)
    optimizer = gradients.state.optimizer
    group = make_group(shape, row_tokens)
    tokens = trained_tokens(group)
    seconds = []
    for step in range(1, STEPS + 2):
        _wait(device)
        begun = time.perf_counter()
        totals = StepTotals(Step(step), Version(step - 1), tokens, len(group.completions))
        gradients.begin(totals, [(group.task.task_id, group.task.attempt)])
        gradients.add([group])
        torch.nn.utils.clip_grad_norm_(gradients.parameters, 1.0)
        optimizer.step()
        gradients.clear()
        _wait(device)
        seconds.append(time.perf_counter() - begun)
    parameters = sum(p.numel() for p in model.parameters())
    best = min(seconds[1:])
    rate = row_tokens / best
    row = {
        "model": shape.name,
        "parameters": parameters,
        "row": row_tokens,
        "with": option,
        "step, s": best,
        "tokens/s": rate,
        "MFU": _mfu(device, parameters, rate),
        **_memory(device, shape, config),
    }
    del model, gradients, optimizer
    gc.collect()
    return row


def _memory(device: torch.device, shape: Shape, config: Config) -> dict[str, Any]:
    """Peak of the device against `paceline plan memory`, less what one process without a mesh does
    not hold."""
    if device.type != "cuda":
        return {"peak, GiB": None, "of the plan": None}
    parts = memory_plan(config, shape_of(shape.config, "bfloat16"))[0].gpu
    planned = sum(
        size
        for name, size in parts.items()
        if name not in ("published weights", "reduction scratch")
    )
    peak = torch.cuda.max_memory_allocated(device)
    return {"peak, GiB": peak / (1 << 30), "of the plan": peak / planned}


def _mfu(device: torch.device, parameters: int, tokens_per_s: float) -> float | None:
    """Share of the device's peak: 6 operations per parameter and token, without what is recomputed
    and without attention.

    Source: Chowdhery et al., PaLM, arXiv 2204.02311, appendix B.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    return None if peak is None else 6 * parameters * tokens_per_s / peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
