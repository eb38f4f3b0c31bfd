"""Measured quantities that merge exactly over micro-batches, ranks and replicas."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from paceline.v1 import common_pb2
from policy_worker.objectives.columns import TokenColumns
from policy_worker.objectives.grpo import Loss
from policy_worker.objectives.kl import token_kl
from policy_worker.step.logprobs import TokenScores

Entry = tuple[float, float, float]
"""Sum, weight and maximum. The mean is sum / weight."""


class Stats:
    """A table of named entries. Adding two tables is the same as having measured all in one."""

    def __init__(self, entries: Mapping[str, Entry] | None = None) -> None:
        self._entries: dict[str, Entry] = dict(entries or {})

    def add(self, name: str, total: float, weight: float, largest: float | None = None) -> None:
        largest = (total / weight if weight else 0.0) if largest is None else largest
        if name in self._entries:
            t, w, m = self._entries[name]
            self._entries[name] = (t + total, w + weight, max(m, largest))
        else:
            self._entries[name] = (total, weight, largest)

    def set(self, name: str, value: float) -> None:
        """A single reading of this replica: weight 1."""
        self._entries[name] = (value, 1.0, value)

    def merge(self, others: Iterable[Mapping[str, Entry]]) -> None:
        for other in others:
            for name, (total, weight, largest) in other.items():
                self.add(name, total, weight, largest)

    @property
    def entries(self) -> dict[str, Entry]:
        """JSON-friendly copy."""
        return dict(self._entries)

    def mean(self, name: str) -> float:
        """0 if nothing was measured."""
        total, weight, _ = self._entries.get(name, (0.0, 0.0, 0.0))
        return total / weight if weight else 0.0

    def messages(self) -> dict[str, common_pb2.Stat]:
        """For a VoteRequest. Entries that are not finite are left out: the vote would be refused."""
        return {
            name: common_pb2.Stat(sum=total, weight=weight, max=largest)
            for name, (total, weight, largest) in self._entries.items()
            if all(map(math.isfinite, (total, weight, largest)))
        }


class StepTimes(Stats):
    """Durations of a step's phases, in seconds: ``time_<phase>_s``."""

    def __init__(self, since: float) -> None:
        """``since``: start of the first phase, by time.monotonic()."""
        super().__init__()
        self._since = since

    def lap(self, phase: str) -> float:
        """Ends ``phase``, which began where the one before it ended. Returns the time now."""
        now = time.monotonic()
        self.set(f"time_{phase}_s", now - self._since)
        self._since = now
        return now

    def add_phases(self, **seconds: float) -> None:
        for phase, duration in seconds.items():
            self.set(f"time_{phase}_s", duration)


def measure(stats: Stats, scores: TokenScores, loss: Loss, columns: TokenColumns[Tensor]) -> None:
    """Adds a micro-batch's entropy, clip_fraction, ratio, logprob_gap, kl_behaviour and kl, over
    trained tokens.

    logprob_gap is |log-prob of the trainer before the step - log-prob as sampled|: what engine and
    trainer compute differently, plus what the policy has moved since (staleness). logprob_gap_fresh
    is the same over tokens of staleness 0 alone: only what they compute differently. kl_behaviour is
    the k3 estimate of KL(behaviour || trainer before the step), in nats.
    """
    with torch.no_grad():
        trained = columns.trained
        gap = (scores.logprobs - columns.behaviour).abs() * trained
        fresh = trained * (columns.staleness == 0)
        drift = token_kl(columns.behaviour, scores.logprobs, "k3") * trained
        masked_ratio = loss.ratio * trained
        numbers: list[Tensor] = [
            trained.sum(),
            (scores.entropy * trained).sum(),
            (loss.clipped * trained).sum(),
            masked_ratio.sum(),
            masked_ratio.max(),
            gap.sum(),
            gap.max(),
            drift.sum(),
            fresh.sum(),
            (gap * fresh).sum(),
            (gap * fresh).max(),
        ]
        if loss.kl is not None:
            numbers.append((loss.kl * trained).sum())
        # One transfer from the device for all of them.
        values = torch.stack(numbers).tolist()
    count, entropy, clipped, ratio_sum, ratio_max, gap_sum, gap_max = values[:7]
    drift_sum, fresh_count, fresh_sum, fresh_max, *kl = values[7:]
    stats.add("entropy", entropy, count)
    stats.add("clip_fraction", clipped, count)
    stats.add("ratio", ratio_sum, count, ratio_max)
    stats.add("logprob_gap", gap_sum, count, gap_max)
    stats.add("kl_behaviour", drift_sum, count)
    if fresh_count:
        stats.add("logprob_gap_fresh", fresh_sum, fresh_count, fresh_max)
    if kl:
        stats.add("kl", kl[0], count)
