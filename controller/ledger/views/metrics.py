"""Metrics of a step: its groups and votes merged into one row of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from controller.ledger.facts import GroupFacts, StatValue
from controller.ledger.state.state import State
from controller.ledger.state.steps import Vote
from controller.ledger.state.token_ages import trained_tokens
from controller.ledger.views.age_metrics import age_metrics

RATIO_SQUARE = "ratio_square"
"""Statistic of votes, sum of squares of the importance weights. With their sum it gives ess, the effective
sample size as a share of the number n of tokens: (sum w)^2 / (n * sum w^2). 1: all weights are equal."""
_MEAN_AND_MAX = ("ratio", "logprob_gap", "logprob_gap_fresh")
"""Statistics of votes whose maximum is reported beside the mean."""


def step_metrics(
    state: State, groups: Sequence[GroupFacts], votes: Iterable[Vote], now: float
) -> dict[str, float]:
    """Metrics of the open step at its commit. Times in seconds, staleness in steps."""
    step = state.steps.open
    assert step is not None
    sequences = sum(g.sequences for g in groups)
    tokens = sum(trained_tokens(state, g, step.step) for g in groups)
    mean = sum(g.reward_mean * g.sequences for g in groups) / sequences
    second = sum((g.reward_std**2 + g.reward_mean**2) * g.sequences for g in groups) / sequences
    step_s = max(now - state.steps.last_commit_t, 1e-6)
    if now < state.steps.last_commit_t:
        step_s = math.nan  # the clock was set back: no rate is better than a rate of billions
    votes = list(votes)
    book = state.tasks
    metrics = {
        "step": float(step.step),
        "version": float(state.versions.version + 1),
        "reward_mean": mean,
        "reward_std": math.sqrt(max(0.0, second - mean**2)),
        **_merge(votes),
        **age_metrics(state, groups, step.step),
        "tokens": float(tokens),
        "samples": float(sequences),
        "tokens_per_s": tokens / step_s,
        "samples_per_s": sequences / step_s,
        "step_s": step_s,
        "response_tokens_mean": sum(g.tokens for g in groups) / sequences,
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
        elif name == RATIO_SQUARE:
            continue
        else:
            out[name] = value
    ratio, square = merged.get("ratio"), merged.get(RATIO_SQUARE)
    if ratio is not None and square is not None and (most := square.weight * square.sum) > 0:
        out["ess"] = ratio.sum * ratio.sum / most
    return out
