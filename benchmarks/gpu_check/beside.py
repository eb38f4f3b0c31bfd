"""Cost of publishing and checkpointing beside training."""

import gc
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.fleet import missing
from benchmarks.gpu_check.models import Shape, make_gradients, make_group, make_model, run_config
from benchmarks.gpu_check.trainer_speed import WARM, timed_step
from benchmarks.weights import Links
from paceline.weights.weight_snapshot import WireDtype
from policy_worker.checkpoint.checkpoint import Checkpointer
from policy_worker.step.gradients import Gradients
from testbed.redis.redis_process import throwaway_redis

STEPS = 8


def beside_training(device: torch.device, shape: Shape, row_tokens: int) -> list[dict[str, Any]]:
    """Steps alone; steps that each begin as a version is published, to a process on this machine;
    steps while a checkpoint is written."""
    config = run_config("bfloat16", row_tokens)
    training = Training(
        make_gradients(make_model(shape, device), config, device), shape, row_tokens
    )
    for _ in range(WARM):
        training.step()
    alone = statistics.median(training.step() for _ in range(STEPS))
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-check-") as name:
        rows = [
            {"model": shape.name, "row": row_tokens, "step alone, s": alone},
            _publishing(training, alone, Path(name)),
            _checkpoint(training, alone, Path(name)),
        ]
    del training
    gc.collect()
    return rows


class Training:
    def __init__(self, gradients: Gradients, shape: Shape, row_tokens: int) -> None:
        self.gradients, self.state = gradients, gradients.state
        groups = [make_group(shape, row_tokens, seed) for seed in range(WARM + STEPS)]
        self._groups = itertools.cycle(groups)

    def step(self) -> float:
        """Seconds of the next step."""
        return timed_step(self.gradients, next(self._groups))["seconds"]


def _publishing(training: Training, alone: float, where: Path) -> dict[str, Any]:
    if lacking := missing():
        return {"beside": "publishing", "left out": f"not installed: {', '.join(lacking)}"}
    wire, device = WireDtype(torch.bfloat16), training.gradients.device
    weights = dict(training.state.model.named_parameters())
    with (
        throwaway_redis(where / "redis") as url,
        Links(url, "gpu-check", 1, device=device, wire=wire) as links,
    ):
        links.publish(0, weights)  # the first one also connects
        held, steps = [], []
        for version in range(1, STEPS + 1):
            held.append(links.publisher.publish(version, weights.items()))
            steps.append(training.step())
        return {
            "beside": "publishing",
            "training held for a version, ms": statistics.median(held) * 1e3,
            "steps slower by, %": (statistics.median(steps) / alone - 1) * 100,
            "first version sent in, s": links.transfer_s[0],
        }


def _checkpoint(training: Training, alone: float, where: Path) -> dict[str, Any]:
    config = training.state.config
    checkpointer = Checkpointer(where / "checkpoints", config, device=training.gradients.device)
    checkpointer.reserve(training.state)
    steps: list[float] = []
    begun = time.perf_counter()
    saved = checkpointer.save_async(training.state)
    held = time.perf_counter() - begun
    while not (steps and saved.done()):
        steps.append(training.step())
    size = sum(file.stat().st_size for file in where.rglob("*.safetensors"))
    return {
        "beside": "a checkpoint",
        "GB": size / 1e9,
        "training held, s": held,
        "longest step beyond those alone, s": max(0.0, max(steps) - alone),
        "durable after, s": saved.result().seconds,
    }
