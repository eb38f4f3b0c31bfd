"""Warnings from a run's evaluations: the held-out score has fallen, or the reward is being hacked.

Reward hacking: the training score rises while what it stands for, measured on held-out prompts,
falls.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.observe.vocabulary import EventType

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


@dataclass(frozen=True, slots=True)
class Warned:
    kind: Literal["held_out", "reward_hacking"]
    step: int
    text: str


@dataclass(slots=True)
class HeldOut:
    """Evaluations of a run so far, from its listed events, and the warnings that hold."""

    spec: dict[str, Any] = field(default_factory=dict)  # The run's, with its changes
    scores: dict[int, float] = field(default_factory=dict)
    """By step: the value that ranks evaluations; higher is better."""
    checked: dict[str, dict[int, Checked]] = field(default_factory=dict)
    """By set and step: evaluations of the sets that measure the truth."""
    training: RewardSums = field(default_factory=RewardSums)  # Since the newest round was begun
    begun: dict[int, tuple[list[str], Estimate | None]] = field(default_factory=dict)
    """Sets that measure the truth, and the training reward since the round before, by step."""
    warnings: dict[str, Warned] = field(default_factory=dict)  # By what they are about

    @property
    def trouble(self) -> str:
        """In a sentence, with the remedy; empty if there is none."""
        return "; ".join(warned.text for warned in self.warnings.values())

    def take(self, kind: str, event: Mapping[str, Any]) -> list[Warned]:
        """Takes the next listed event. Returns the warnings that hold since then."""
        if kind == EventType.STEP_COMMITTED:
            metrics = event.get("metrics") or {}
            if (mean := metrics.get("reward_mean")) is not None:
                deviation = metrics.get("reward_std") or 0.0
                self.training.add(mean, deviation, self.spec.get("groups_per_step", 1))
        elif kind == EventType.EVAL_SCHEDULED:
            # A set: name, rows, samples, every, solved_at, truth.
            truths = [name for name, *_, truth in event.get("sets") or () if truth]
            self.begun[event["step"]] = truths, self.training.estimate
            self.training = RewardSums()
        elif kind == EventType.EVAL_RECORDED:
            return self._recorded(event)
        elif kind == EventType.CHECKPOINT_VOIDED:
            self.scores.pop(event["step"], None)
            for by_step in self.checked.values():
                by_step.pop(event["step"], None)
            self._judge()
        elif kind in (EventType.RUN_STARTED, EventType.SETTINGS_CHANGED):
            self.spec |= event.get("spec") or {}
        return []

    def _recorded(self, event: Mapping[str, Any]) -> list[Warned]:
        step, loss, score = event["step"], event.get("loss"), event.get("score")
        truths, training = self.begun.pop(step, ([], None))
        for result in event.get("sets") or ():
            name, metrics = result["name"], result["metrics"]
            if name in truths and "reward" in metrics:
                truth = Estimate(metrics["reward"], metrics["reward_se"])
                self.checked.setdefault(name, {})[step] = Checked(step, truth, training)
        if (score := score if loss is None else -loss) is not None:
            self.scores[step] = score
        before = self.warnings
        self._judge()
        return [warned for about, warned in self.warnings.items() if about not in before]

    def _judge(self) -> None:
        self.warnings = dict(self._found(self.spec.get("eval_drop") or 0.0))

    def _found(self, drop: float) -> Iterator[tuple[str, Warned]]:
        if self.scores and drop:
            # By step: a round of many rows may end after the one of a later step.
            last, best = max(self.scores), max(sorted(self.scores), key=self.scores.__getitem__)
            score, highest = self.scores[last], self.scores[best]
            if highest - score > drop * abs(highest):
                text = self._fall(last, score, best, highest)
                yield "held_out", Warned("held_out", last, text)
        for name, by_step in self.checked.items():
            if found := exploited([by_step[step] for step in sorted(by_step)], drop):
                text = hacking_in_words(f"{name}/reward", found)
                yield f"{name}/reward", Warned("reward_hacking", found.step, text)

    def _fall(self, step: int, score: float, best: int, highest: float) -> str:
        if self.spec.get("recorded"):
            return (
                f"held-out loss rose to {-score:.4f} after step {step}; it was {-highest:.4f} "
                f"after step {best}"
            )
        return (
            f"{self.spec.get('best_metric') or 'held-out reward'} fell to {score:.3f} after step "
            f"{step}; it was {highest:.3f} after step {best}"
        )


def hacking_in_words(metric: str, found: Exploited) -> str:
    """The measurement, its meaning, and the remedy, in words."""
    return (
        f"the training score rises ({found.best_score:.3f} to {found.score:.3f}) while {metric} "
        f"falls ({found.best_truth:.3f} after step {found.best_step}, {found.truth:.3f} after step "
        f"{found.step}): the learned reward is probably being exploited; begin again with a larger "
        f"train.loss.kl_coef, or stop at step {found.best_step}"
    )
