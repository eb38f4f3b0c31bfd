"""Metrics of a step: its groups and votes merged into one row of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from controller.ledger.facts import GroupFacts, StatValue
from controller.ledger.state import State
from controller.ledger.steps import Vote

_MEAN_AND_MAX = ("ratio", "logprob_gap", "logprob_gap_fresh")
"""Statistics of votes whose maximum is reported beside the mean."""


def step_metrics(
    state: State, groups: Sequence[GroupFacts], votes: Iterable[Vote], now: float
) -> dict[str, float]:
    """Metrics of the open step at its commit. Times in seconds, staleness in steps."""
    step = state.steps.open
    assert step is not None
    sequences = sum(g.sequences for g in groups)
    tokens = sum(g.tokens for g in groups)
    mean = sum(g.reward_mean * g.sequences for g in groups) / sequences
    second = sum((g.reward_std**2 + g.reward_mean**2) * g.sequences for g in groups) / sequences
    step_s = max(now - state.steps.last_commit_t, 1e-6)
    versions = state.versions
    stale_sum = sum(
        max(0.0, (step.step - 1 + versions.offset_of(g.min_version)) * g.tokens - g.version_sum)
        for g in groups
    )
    votes = list(votes)
    book = state.tasks
    metrics = {
        "step": float(step.step),
        "version": float(versions.version + 1),
        "reward_mean": mean,
        "reward_std": math.sqrt(max(0.0, second - mean**2)),
        **_merge(votes),
        "staleness_mean": stale_sum / tokens,
        "staleness_max": float(max(versions.staleness(g.min_version, step.step) for g in groups)),
        "tokens": float(tokens),
        "samples": float(sequences),
        "tokens_per_s": tokens / step_s,
        "samples_per_s": sequences / step_s,
        "step_s": step_s,
        "response_tokens_mean": tokens / sequences,
        "time_generate_s": sum(g.generate_s for g in groups) / len(groups),
        "time_reward_s": sum(g.reward_s for g in groups) / len(groups),
        "queue_pending": float(len(book.pending)),
        "queue_leased": float(book.leased),
        "queue_ready": float(len(book.ready)),
        "replicas": float(len(votes)),
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _merge(votes: Sequence[Vote]) -> dict[str, float]:
    merged: dict[str, StatValue] = {}
    for vote in votes:
        for name, s in vote.stats.items():
            if not (math.isfinite(s.sum) and math.isfinite(s.weight)):
                continue
            m = merged.get(name)
            merged[name] = (
                s if m is None else StatValue(m.sum + s.sum, m.weight + s.weight, max(m.max, s.max))
            )
    out: dict[str, float] = {}
    for name, s in merged.items():
        value = s.sum / s.weight if s.weight > 0 else 0.0
        if name in _MEAN_AND_MAX:
            out[f"{name}_mean"], out[f"{name}_max"] = value, s.max
        else:
            out[name] = value
    return out
