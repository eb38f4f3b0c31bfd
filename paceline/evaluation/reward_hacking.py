"""Reward hacking: the training score rises while what it stands for, measured on held-out prompts,
falls. Pure.

A learned reward is a proxy. Optimised hard enough, it goes on rising while the true quality falls
(Gao et al., "Scaling laws for reward model overoptimization", arXiv 2210.10760). A set of held-out
prompts with a reward of its own shows it:

    truth   ▁▃▅▇█▇▅▃▁      fallen: the newest two are below the best one by more than noise
    score   ▁▂▃▄▅▆▇▇█      risen: its mean before them is above that around the best one
                ↑ best     step to go back to

A score that falls along with the truth is another fault, for example a learning rate that is too
high.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NEWEST = 2
"""Evaluations that must all be lower: a single one swings."""
TRUTH_NOISE = 3.5
"""Standard errors of the difference by which the truth must be lower. It is compared with the
highest of many evaluations, which is high by chance."""
SCORE_NOISE = 2.0
"""Standard errors of the difference by which the score must be higher."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error."""

    compact = True

    mean: float
    error: float = 0.0


@dataclass(slots=True)
class RewardSums:
    """Sums over some steps: of the means of training rewards, and of the variances of these
    means."""

    steps: int = 0
    total: float = 0.0
    variance: float = 0.0

    def add(self, mean: float, deviation: float, groups: int) -> None:
        """Samples of one prompt are alike: each group counts as one draw of ``deviation``."""
        self.steps += 1
        self.total += mean
        self.variance += deviation**2 / max(1, groups)

    @property
    def estimate(self) -> Estimate | None:
        if not self.steps:
            return None
        return Estimate(self.total / self.steps, math.sqrt(self.variance) / self.steps)


@dataclass(frozen=True, slots=True)
class Checked:
    """An evaluation by a reward that is not the trained one."""

    compact = True

    step: int
    truth: Estimate
    score: Estimate | None = None
    """Training reward of the steps since the evaluation before; None before the first step."""


@dataclass(frozen=True, slots=True)
class Exploited:
    """Step, truth and the score before it, of the newest and of the best evaluation."""

    step: int
    truth: float
    best_step: int
    best_truth: float
    score: float
    best_score: float


def exploited(evaluations: Sequence[Checked], drop: float) -> Exploited | None:
    """Evidence that the score rose while the truth fell by ``drop`` of its best (0: never), if
    any."""
    if not drop or len(evaluations) <= NEWEST:
        return None
    best = max(range(len(evaluations)), key=lambda i: evaluations[i].truth.mean)
    newest = evaluations[-NEWEST:]
    if best >= len(evaluations) - NEWEST:
        return None
    top = evaluations[best].truth
    if not all(_below(each.truth, top, drop) for each in newest):
        return None
    # Before the first step there was no score: that of the first ones is the nearest.
    around = evaluations[max(0, best - 1) : best + 1]
    before = _mean(around) or _mean(evaluations[best + 1 : best + 2])
    after = _mean(newest)
    if before is None or after is None:
        return None
    if after.mean - before.mean <= SCORE_NOISE * math.hypot(after.error, before.error):
        return None
    last = evaluations[-1]
    return Exploited(
        last.step, last.truth.mean, evaluations[best].step, top.mean, after.mean, before.mean
    )


def _below(truth: Estimate, best: Estimate, drop: float) -> bool:
    noise = TRUTH_NOISE * math.hypot(truth.error, best.error)
    return best.mean - truth.mean > max(drop * abs(best.mean), noise)


def _mean(evaluations: Sequence[Checked]) -> Estimate | None:
    scores = [each.score for each in evaluations if each.score is not None]
    if not scores:
        return None
    error = math.sqrt(math.fsum(s.error**2 for s in scores)) / len(scores)
    return Estimate(math.fsum(s.mean for s in scores) / len(scores), error)
