"""System that a plan is made for: its batch, an engine's time per token, a trainer's time per
batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from testbed.planner.lengths import Lengths

BANDWIDTH_USED, FLOPS_USED = 0.6, 0.5
"""Shares of a GPU's bandwidth and arithmetic that decoding reaches. Assumed, not fitted."""
MEMORY_USED = 0.85
"""Share of an engine's memory that weights and cache have."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Of one training step."""

    groups: int
    group_size: int
    prompt_tokens: int
    lengths: Lengths

    @property
    def samples(self) -> int:
        return self.groups * self.group_size

    @property
    def tokens(self) -> float:
        """Expected completion tokens."""
        return self.samples * self.lengths.mean


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU, by its published figures."""

    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes per second."""
    flops: float
    """Dense bfloat16 operations per second."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    parameters: float
    active: float
    """Parameters that one token uses: fewer than all in a mixture of experts."""
    kv_bytes: float
    """Of one token's keys and values, over all layers."""

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Seconds per token that every running sequence of an engine advances by: fixed + per_sequence
    x running + per_context_token x tokens in the cache."""

    fixed: float
    per_sequence: float
    per_context_token: float
    cache_tokens: float
    """Tokens whose keys and values fit."""
    most: float = math.inf
    """Sequences that run at once."""

    @classmethod
    def of(cls, model: ModelSize, gpu: Accelerator, tp: int, overhead_s: float) -> EngineTime:
        """``tp``: GPUs of an engine. ``overhead_s``: seconds per token beyond reading the weights,
        of the host and of the engine's collectives; no published figure predicts it. Raises
        ValueError if the weights do not fit."""
        bandwidth = gpu.bandwidth * tp * BANDWIDTH_USED
        room = MEMORY_USED * gpu.memory * tp - model.weight_bytes
        if room <= 0:
            raise ValueError(
                f"{model.weight_bytes / 1e9:.0f} GB of weights do not fit an engine of {tp} GPUs "
                f"of {gpu.memory / 1e9:.0f} GB"
            )
        return cls(
            fixed=overhead_s + model.weight_bytes / bandwidth,
            per_sequence=2 * model.active / (gpu.flops * tp * FLOPS_USED),
            per_context_token=model.kv_bytes / bandwidth,
            cache_tokens=room / model.kv_bytes,
        )

    def with_overhead(self, more_s: float) -> EngineTime:
        return replace(self, fixed=self.fixed + more_s)


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of a stage of training for one batch: gpu_seconds / GPUs + constant. Fixed
    mini-batches and collectives make the constant, and without it more GPUs look better than they
    are."""

    gpu_seconds: float
    constant: float = 0.0

    def seconds(self, gpus: int) -> float:
        return self.gpu_seconds / gpus + self.constant

    def times(self, factor: float) -> StageTime:
        return StageTime(self.gpu_seconds * factor, self.constant * factor)

    @classmethod
    def fit(cls, rows: Sequence[tuple[int, float]]) -> StageTime:
        """Least squares over (GPUs, seconds), neither part below 0. One row: all of it scales."""
        if len({gpus for gpus, _ in rows}) < 2:
            return cls(sum(gpus * seconds for gpus, seconds in rows) / len(rows))
        x = [1 / gpus for gpus, _ in rows]
        y = [seconds for _, seconds in rows]
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
        slope /= sum((a - mean_x) ** 2 for a in x)
        constant = mean_y - slope * mean_x
        if slope < 0:
            return cls(0.0, mean_y)
        if constant < 0:
            return cls(sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x))
        return cls(slope, constant)

    def with_constant_share(self, share: float, gpus: int) -> StageTime:
        """The same seconds at ``gpus`` GPUs, of which ``share`` no longer divides."""
        whole = self.seconds(gpus)
        return StageTime(gpus * whole * (1 - share), whole * share)


@dataclass(frozen=True, slots=True)
class System:
    batch: Batch
    engine: EngineTime
    tp: int
    """GPUs of an engine."""
    update: StageTime
    log_prob: StageTime
    """Recomputing behaviour log-probs before the update."""
    pause_s: float = 0.0
    """In which trainers and engines stand still for new weights, once a version."""
    publish_s: float = 0.0
    """From a commit until engines serve its weights, while both go on."""
    rest_s: float = 0.0
    """Of a synchronous step, beside its three parts: offloading, switching between the parts."""

    def for_batch(self, batch: Batch) -> System:
        """The same system with another batch: training takes as much longer as it has more
        tokens."""
        factor = batch.tokens / self.batch.tokens
        return replace(
            self,
            batch=batch,
            update=self.update.times(factor),
            log_prob=self.log_prob.times(factor),
        )
