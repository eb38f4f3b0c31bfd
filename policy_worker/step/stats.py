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

    _entries: dict[str, Entry] = field(default_factory=dict)
    _on_device: list[tuple[tuple[str, ...], Tensor]] = field(default_factory=list)

    @property
    def entries(self) -> dict[str, Entry]:
        """All that was added; the first look brings what is on the device, in one transfer."""
        waiting, self._on_device = self._on_device, []
        if waiting:
            numbers = torch.cat([sums for _, sums in waiting]).tolist()
            names = (name for row, _ in waiting for name in row)
            for name, (total, weight, largest) in zip(names, numbers, strict=True):
                if weight or total:
                    self.add(name, total, weight, largest if name in _MAXIMA else None)
        return self._entries

    def add(self, name: str, total: float, weight: float, largest: float | None = None) -> None:
        largest = (total / weight if weight else 0.0) if largest is None else largest
        if name in self._entries:
            t, w, m = self._entries[name]
            self._entries[name] = (t + total, w + weight, max(m, largest))
        else:
            self._entries[name] = (total, weight, largest)

    def add_on_device(self, names: Iterable[str], sums: Tensor) -> None:
        """``sums``: [names, 3], entries that stay on the device until somebody looks."""
        self._on_device.append((tuple(names), sums))

    def set(self, name: str, value: float) -> None:
        """A single reading of this replica: weight 1."""
        self._entries[name] = (value, 1.0, value)

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


_MAXIMA = {"ratio", "logprob_gap", "logprob_gap_fresh"}
"""Entries whose maximum is that of a token; the others have that of a micro-batch's mean."""
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
    """Adds a micro-batch's loss; entropy, ratio, logprob_gap, kl_behaviour (if there is a policy),
    and what the objective measured, over trained tokens. The host waits for none of it.

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
        measured = {"entropy": scores.entropy} if len(scores.before) else {}
        masks = {}
        if len(scores.before) and sampled:
            gap = (scores.before - columns.behaviour).abs()
            weight = ratio(scores.before, columns.behaviour)
            measured |= {
                "ratio": weight,
                "ratio_square": weight.square(),
                "logprob_gap": gap,
                "logprob_gap_fresh": gap,
                "kl_behaviour": token_kl(columns.behaviour, scores.before, "k3"),
            }
            masks["logprob_gap_fresh"] = trained * (columns.staleness == 0)
        measured |= loss.measured
        zero = torch.zeros_like(loss.total)
        rows = [torch.stack([loss.total, zero, zero])[None]]
        if measured:
            mask = torch.stack([masks.get(name, trained) for name in measured])
            values = torch.stack([column.float() for column in measured.values()]) * mask
            rows.append(torch.stack([values.sum(-1), mask.sum(-1), values.amax(-1)], -1))
        means = {name: mean for name, mean in loss.means.items() if mean.values.numel()}
        for mean in means.values():
            weights = torch.ones_like(mean.values) if mean.weights is None else mean.weights
            total = (mean.values * weights).sum()
            rows.append(torch.stack([total, weights.sum(), total])[None])
        stats.add_on_device(["loss", *measured, *means], torch.cat(rows))
