"""Measured quantities that merge exactly over micro-batches, ranks and replicas."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.v1 import common_pb2, rollout_pb2
from policy_worker.objectives.columns import TokenColumns, TokenScores
from policy_worker.objectives.grpo import ratio, token_kl
from policy_worker.objectives.objective import Loss

Entry = tuple[float, float, float]
"""Sum, weight and maximum. The mean is sum / weight."""


@dataclass
class Stats:
    """A table of named entries. Adding two tables is the same as having measured all in one."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, name: str, total: float, weight: float, largest: float | None = None) -> None:
        largest = (total / weight if weight else 0.0) if largest is None else largest
        if name in self.entries:
            t, w, m = self.entries[name]
            self.entries[name] = (t + total, w + weight, max(m, largest))
        else:
            self.entries[name] = (total, weight, largest)

    def set(self, name: str, value: float) -> None:
        """A single reading of this replica: weight 1."""
        self.entries[name] = (value, 1.0, value)

    def merge(self, others: Iterable[Mapping[str, Entry]]) -> None:
        for other in others:
            for name, (total, weight, largest) in other.items():
                self.add(name, total, weight, largest)

    def mean(self, name: str) -> float:
        """0 if nothing was measured."""
        total, weight, _ = self.entries.get(name, (0.0, 0.0, 0.0))
        return total / weight if weight else 0.0

    def messages(self) -> dict[str, common_pb2.Stat]:
        """For a VoteRequest, without entries that are not finite: it would be refused."""
        return {
            name: common_pb2.Stat(sum=total, weight=weight, max=largest)
            for name, (total, weight, largest) in self.entries.items()
            if all(map(math.isfinite, (total, weight, largest)))
        }


_STRANGE = re.compile(r"[^A-Za-z0-9_.:-]")
_LONGEST_NAME = 48
"""Characters of a reward function's name in the names of statistics."""


def count_rewards(stats: Stats, groups: Iterable[rollout_pb2.Group]) -> None:
    """Adds reward/NAME and reward_square/NAME of every reward function: its values, before weights,
    and their squares, over completions."""
    columns: dict[str, list[float]] = {}
    for group in groups:
        for completion in group.completions:
            for name, value in completion.reward_components.items():
                columns.setdefault(_STRANGE.sub("_", name)[-_LONGEST_NAME:], []).append(value)
    for name, values in columns.items():
        stats.add(f"reward/{name}", sum(values), len(values))
        stats.add(f"reward_square/{name}", sum(v * v for v in values), len(values))


def measure(
    stats: Stats,
    scores: TokenScores,
    loss: Loss,
    columns: TokenColumns[Tensor],
    *,
    sampled: bool = True,
) -> None:
    """Adds a micro-batch's entropy, ratio, logprob_gap, kl_behaviour (if there is a policy), and
    what the objective measured, over trained tokens.

    ratio is the importance weight trainer / behaviour, before clip, cap and masks; its sum and that
    of ratio_square give the effective sample size of the step. logprob_gap is |log-prob of the
    trainer before the step - log-prob as sampled|: what engine and trainer compute differently,
    plus what the policy has moved since (staleness). logprob_gap_fresh is the same over tokens of
    staleness 0 alone: only what they compute differently. kl_behaviour is the k3 estimate of
    KL(behaviour || trainer before the step), in nats. ``sampled``: False for recorded tokens, which
    no policy sampled: of them only the entropy, and what the objective measured.
    """
    with torch.no_grad():
        trained = columns.trained
        measured = {name: (values, trained) for name, values in loss.measured.items()}
        if len(scores.before):
            compared = {}
            if sampled:
                gap = (scores.before - columns.behaviour).abs()
                weight = ratio(scores.before, columns.behaviour)
                kl = token_kl(columns.behaviour, scores.before, "k3")
                compared = {
                    "ratio": (weight, trained),
                    "ratio_square": (weight.square(), trained),
                    "logprob_gap": (gap, trained),
                    "logprob_gap_fresh": (gap, trained * (columns.staleness == 0)),
                    "kl_behaviour": (kl, trained),
                }
            measured = {"entropy": (scores.entropy.detach(), trained), **compared, **measured}
        for name, mean in loss.means.items():
            if mean.values.numel():
                ones = torch.ones_like(mean.values)
                measured[name] = mean.values, ones if mean.weights is None else mean.weights
        if not measured:
            return
        entries = [
            torch.stack([(values * mask).sum(), mask.sum(), (values * mask).max()])
            for values, mask in measured.values()
        ]
        # One transfer from the device for all of them.
        numbers = torch.stack(entries).tolist()
    for name, (total, count, largest) in zip(measured, numbers, strict=True):
        if count or (name != "logprob_gap_fresh" and name not in loss.means):
            exact_maximum = name in ("ratio", "logprob_gap", "logprob_gap_fresh")
            stats.add(name, total, count, largest if exact_maximum else None)
