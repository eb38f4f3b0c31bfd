"""Speed and memory of the trainer on one device: tokens per second, MFU, peak memory against the
plan, and what the publication of weights takes from training."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
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
from paceline.lora import adapters_of
from paceline.memory_plan import memory_plan
from paceline.model_shape import shape_of
from paceline.process.compute_device import peak_flops
from paceline.v1.rollout_pb2 import Group
from paceline.weights.weight_snapshot import SnapshotPool, WeightSnapshot, WireDtype
from policy_worker.objectives.batch import BadGroup, StepTotals
from policy_worker.step.gradients import Gradients

WARM, STEPS = 2, 5
"""Steps before those that are measured: the first compiles, the second may compile again."""
VERSIONS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "attention by blocks": {"attention": "sdpa"},
    "without compilation": {"compiled": False},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "offloaded activations": {"gradient_checkpointing": True, "offload_activations": True},
    "offloaded optimizer": {"offload_optimizer": True},
}
"""Settings of the trainer that change its speed and memory alone."""
LORA = "adapters of rank 16"
SETTINGS = OPTIONS | {LORA: {"lora": {"rank": 16}, "gradient_checkpointing": True}}


def trainer_speed(
    device: torch.device, shape: Shape, sizes: Sequence[int], option: str = ""
) -> list[dict[str, Any]]:
    """For each size, steps of one row of so many tokens, whose sequences have other lengths in each
    step: forward, loss, backward, clip, AdamW. ``option``: one of SETTINGS; by default none."""
    chosen = SETTINGS.get(option, {})
    config = run_config("bfloat16", max(sizes), **chosen)
    gradients = make_gradients(make_model(shape, device, config.model.lora), config, device)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        groups = [make_group(shape, size, seed) for seed in range(WARM + STEPS)]
        try:
            steps = [timed_step(gradients, group) for group in groups]
        except BadGroup as error:  # a row that does not fit
            rows.append({"model": shape.name, "row": size, "does not fit": str(error)})
            break
        seconds = sorted(step["seconds"] for step in steps[WARM:])
        middle = statistics.median(seconds)
        plan = run_config("bfloat16", size // 2, **chosen)  # its limit is twice that
        rows.append(
            {
                "model": shape.name,
                "row": size,
                "with": option or "defaults",
                "first step, s": steps[0]["seconds"],
                "step, s": middle,
                "fastest and slowest, s": (seconds[0], seconds[-1]),
                "host in a step, s": statistics.median(step["host"] for step in steps[WARM:]),
                "tokens/s": size / middle,
                **_on_gpu(gradients, shape, plan, groups[-1], middle),
            }
        )
    return rows


def timed_step(gradients: Gradients, group: Group) -> dict[str, float]:
    """Seconds of a step, and those until the host had queued all of it."""
    _wait(gradients.device)
    begun = time.perf_counter()
    totals = StepTotals(Step(1), Version(0), trained_tokens(group), len(group.completions))
    gradients.begin(totals, [(group.task.task_id, group.task.attempt)])
    gradients.add([group])
    torch.nn.utils.clip_grad_norm_(gradients.parameters, 1.0, foreach=True)
    gradients.state.optimizer.step()
    gradients.clear()
    queued = time.perf_counter() - begun
    _wait(gradients.device)
    return {"host": queued, "seconds": time.perf_counter() - begun}


def _on_gpu(
    gradients: Gradients, shape: Shape, config: Config, group: Group, seconds: float
) -> dict[str, float]:
    """Share of a step in which the GPU computes, from the times of its kernels; share of its peak,
    for 6 operations per parameter and token, 4 if it is frozen, without what is recomputed and
    attention (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B); and peak memory against
    `paceline plan memory`, less what one process without a mesh does not hold."""
    if gradients.device.type != "cuda":
        return {}
    sizes = shape_of(shape.config, "bfloat16")
    if config.model.lora is not None:
        sizes = replace(sizes, adapters=sum(p.numel() for p in gradients.parameters))
    parts = memory_plan(config, sizes)[0].gpu
    planned = sum(parts.values()) - parts["published weights"] - parts["reduction scratch"]
    peak = torch.cuda.max_memory_allocated(gradients.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        timed_step(gradients, group)
    busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
    flops = peak_flops(gradients.device) or float("nan")
    tokens = int(config.train.memory.tokens_per_microbatch)
    return {
        "GPU busy": busy / seconds,
        "MFU": gradients.operations_a_token * tokens / seconds / flops,
        "peak, GiB": peak / (1 << 30),
        "of the plan": peak / planned,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def with_adapters(device: torch.device, shape: Shape, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """LoRA: the steps of trainer_speed(), and versions that have the adapters alone."""
    return [*trainer_speed(device, shape, sizes, LORA), publication(device, shape, LORA)]


def publication(device: torch.device, shape: Shape, option: str = "") -> dict[str, Any]:
    """Snapshots in bfloat16. The training thread is held while it starts the copy, not while the
    device makes it."""
    lora = run_config("bfloat16", 1, **SETTINGS.get(option, {})).model.lora
    model = make_model(shape, device, lora)
    weights = dict(model.named_parameters()) if lora is None else adapters_of(model)
    pool, wire = SnapshotPool(), WireDtype(torch.bfloat16)
    held, copied, rates = [], [], []
    for version in range(VERSIONS):
        begun = time.perf_counter()
        snapshot = WeightSnapshot.take(version, weights.items(), pool, wire=wire)
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
        "with": option or "defaults",
        "GB": size / 1e9,
        "held by training, ms": statistics.median(held[1:]) * 1e3,
        "snapshot complete, ms": statistics.median(copied[1:]) * 1e3,
        "to the host, GB/s": statistics.median(rates[1:]) / 1e9,
    }
