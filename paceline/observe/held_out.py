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
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from paceline.observe.vocabulary import EventType

NEWEST = 2
"""Evaluations that must all be lower: a single one swings."""
TRUTH_NOISE = 3.5
"""Standard errors of the difference by which the truth must be lower. It is compared with the
highest of many evaluations, which is high by chance."""
SCORE_NOISE = 2.0
"""Standard errors of the difference by which the score must be higher."""
MOST_STEPS = 4096  # Newest steps since the round before whose rewards are its score


class Estimate(NamedTuple):
    """A mean and its standard error."""

    mean: float
    error: float = 0.0


def mean_of(estimates: Sequence[Estimate]) -> Estimate | None:
    """The mean of independent estimates; None for none."""
    if not estimates:
        return None
    error = math.sqrt(math.fsum(e.error**2 for e in estimates)) / len(estimates)
    return Estimate(math.fsum(e.mean for e in estimates) / len(estimates), error)


class Checked(NamedTuple):
    """An evaluation by a reward that is not the trained one."""

    step: int
    truth: Estimate
    score: Estimate | None = None
    """Training reward of the steps since the evaluation before; None before the first step."""


class Warned(NamedTuple):
    kind: Literal["held_out", "reward_hacking"]
    step: int
    text: str


def exploited(metric: str, evaluations: Sequence[Checked], drop: float) -> Warned | None:
    """Warns if the score rose while ``metric``, the truth, fell by ``drop`` of its best (0:
    never)."""
    if not drop or len(evaluations) <= NEWEST:
        return None
    best = max(range(len(evaluations)), key=lambda i: evaluations[i].truth.mean)
    if best >= len(evaluations) - NEWEST:
        return None
    top, newest = evaluations[best].truth, evaluations[-NEWEST:]
    for _, truth, _ in newest:
        noise = TRUTH_NOISE * math.hypot(truth.error, top.error)
        if top.mean - truth.mean <= max(drop * abs(top.mean), noise):
            return None

    def score(around: Sequence[Checked]) -> Estimate | None:
        return mean_of([each.score for each in around if each.score is not None])

    # Before the first step there was no score: that of the first ones is the nearest.
    before = score(evaluations[max(0, best - 1) : best + 1]) or score([evaluations[best + 1]])
    after = score(newest)
    if before is None or after is None:
        return None
    if after.mean - before.mean <= SCORE_NOISE * math.hypot(after.error, before.error):
        return None
    last, best_step = evaluations[-1], evaluations[best].step
    text = (
        f"the training score rises ({before.mean:.3f} to {after.mean:.3f}) while {metric} falls "
        f"({top.mean:.3f} after step {best_step}, {last.truth.mean:.3f} after step {last.step}): "
        "the learned reward is probably being exploited; begin again with a larger "
        f"train.loss.kl_coef, or stop at step {best_step}"
    )
    return Warned("reward_hacking", last.step, text)


def left_out_in_words(other: int, failed: int) -> str:
    """Prompts that are in no mean, and why: a clause, empty if there are none. ``other``: sampled
    with other weights; ``failed``: without a score."""
    reasons = f"{other} sampled with other weights" if other else ""
    if failed:
        reasons += f"{' and ' * bool(other)}{failed} without a score (paceline events --faults)"
    return f"; left out: {reasons}" if reasons else ""


@dataclass(slots=True)
class HeldOut:
    """Evaluations of a run so far, from its listed events, and the warnings that hold."""

    spec: dict[str, Any] = field(default_factory=dict)  # The run's, with its changes
    scores: dict[int, float] = field(default_factory=dict)
    """By step: the value that ranks evaluations; higher is better."""
    checked: dict[str, dict[int, Checked]] = field(default_factory=dict)
    """By set and step: evaluations of the sets that measure the truth."""
    training: deque[Estimate] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    """Mean training reward of each step since the newest round was begun."""
    begun: dict[int, tuple[list[str], Estimate | None]] = field(default_factory=dict)
    """Sets that measure the truth, and the training reward since the round before, by step."""
    warnings: dict[str, Warned] = field(default_factory=dict)  # By what they are about
    left_out: str = ""  # Prompts of the newest evaluation that its means leave out, and why

    @property
    def trouble(self) -> str:
        """In a sentence, with the remedy; empty if there is none."""
        found = [warned.text for warned in self.warnings.values()]
        return "; ".join([*found, self.left_out] if self.left_out else found)

    def take(self, kind: str, event: Mapping[str, Any]) -> list[Warned]:
        """Takes the next listed event. Returns the warnings that hold since then."""
        if kind == EventType.STEP_COMMITTED:
            metrics = event.get("metrics") or {}
            if (mean := metrics.get("reward_mean")) is not None:
                # Samples of one prompt are alike: each group counts as one draw.
                groups = self.spec.get("groups_per_step", 1)
                deviation = metrics.get("reward_std") or 0.0
                self.training.append(Estimate(mean, deviation / math.sqrt(groups)))
        elif kind == EventType.EVAL_SCHEDULED:
            # A set: name, rows, samples, every, solved_at, truth.
            truths = [name for name, *_, truth in event.get("sets") or () if truth]
            self.begun[event["step"]] = truths, mean_of(self.training)
            self.training.clear()
        elif kind == EventType.EVAL_RECORDED:
            return self._recorded(event)
        elif kind == EventType.CHECKPOINT_VOIDED:
            self.scores.pop(event["step"], None)
            for by_step in self.checked.values():
                by_step.pop(event["step"], None)
            self.warnings = dict(self._found())
        elif kind in (EventType.RUN_STARTED, EventType.SETTINGS_CHANGED):
            self.spec |= event.get("spec") or {}
        return []

    def _recorded(self, event: Mapping[str, Any]) -> list[Warned]:
        step, loss, score = event["step"], event.get("loss"), event.get("score")
        truths, training = self.begun.pop(step, ([], None))
        reason = "failed" if self.spec.get("recorded") else "left_out"
        sets = event.get("sets") or [{"name": "held_out", reason: event.get("left_out")}]
        counts = {s["name"]: (s.get("left_out") or 0, s.get("failed") or 0) for s in sets}
        told = [f"{n}{left_out_in_words(*of)}".lstrip("; ") for n, of in counts.items() if any(of)]
        self.left_out = f"evaluation after step {step}: {', '.join(told)}" if told else ""
        for result in event.get("sets") or ():
            name, metrics = result["name"], result["metrics"]
            if name in truths and "reward" in metrics:
                truth = Estimate(metrics["reward"], metrics["reward_se"])
                self.checked.setdefault(name, {})[step] = Checked(step, truth, training)
        if (score := score if loss is None else -loss) is not None:
            self.scores[step] = score
        before, self.warnings = self.warnings, dict(self._found())
        return [warned for about, warned in self.warnings.items() if about not in before]

    def _found(self) -> Iterator[tuple[str, Warned]]:
        drop = self.spec.get("eval_drop") or 0.0
        if self.scores and drop:
            # By step: a round of many rows may end after the one of a later step.
            last, best = max(self.scores), max(sorted(self.scores), key=self.scores.__getitem__)
            score, highest = self.scores[last], self.scores[best]
            if highest - score > drop * abs(highest):
                fell = f"{self.spec.get('best_metric') or 'held-out reward'} fell to {score:.3f}"
                was = f"{highest:.3f}"
                if self.spec.get("recorded"):
                    fell, was = f"held-out loss rose to {-score:.4f}", f"{-highest:.4f}"
                text = f"{fell} after step {last}; it was {was} after step {best}"
                yield "held_out", Warned("held_out", last, text)
        for name, by_step in self.checked.items():
            metric = f"{name}/reward"
            if found := exploited(metric, [by_step[step] for step in sorted(by_step)], drop):
                yield metric, found
