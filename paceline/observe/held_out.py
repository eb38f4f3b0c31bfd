"""Warning from a run's evaluations: the held-out score has fallen.

A learned reward is a proxy. Optimised hard enough, it goes on rising while the true quality falls
(Gao et al., "Scaling laws for reward model overoptimization", arXiv 2210.10760). A set of held-out
prompts with a reward of its own, if it ranks the evaluations, shows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.observe.vocabulary import EventType


def left_out_in_words(other: int, failed: int) -> str:
    """Prompts that are in no mean, and why: a clause, empty if there are none. ``other``: sampled
    with other weights; ``failed``: without a score."""
    reasons = f"{other} sampled with other weights" if other else ""
    if failed:
        reasons += f"{' and ' * bool(other)}{failed} without a score (paceline events --faults)"
    return f"; left out: {reasons}" if reasons else ""


@dataclass(slots=True)
class HeldOut:
    """Evaluations of a run so far, from its listed events, and the warning that holds."""

    spec: dict[str, Any] = field(default_factory=dict)  # The run's, with its changes
    scores: dict[int, float] = field(default_factory=dict)
    """By step: the value that ranks evaluations; higher is better."""
    left_out: str = ""  # Prompts of the newest evaluation that its means leave out, and why

    @property
    def trouble(self) -> str:
        """In a sentence; empty if there is none."""
        return "; ".join(filter(None, (self.fallen, self.left_out)))

    @property
    def fallen(self) -> str:
        """From which score to which the newest evaluation has fallen; empty if it has not."""
        drop = self.spec.get("eval_drop") or 0.0
        if not (self.scores and drop):
            return ""
        # By step: a round of many rows may end after the one of a later step.
        last, best = max(self.scores), max(sorted(self.scores), key=self.scores.__getitem__)
        score, highest = self.scores[last], self.scores[best]
        if highest - score <= drop * abs(highest):
            return ""
        fell = f"{self.spec.get('best_metric') or 'held-out reward'} fell to {score:.3f}"
        was = f"{highest:.3f}"
        if self.spec.get("recorded"):
            fell, was = f"held-out loss rose to {-score:.4f}", f"{-highest:.4f}"
        return f"{fell} after step {last}; it was {was} after step {best}"

    def take(self, kind: str, event: Mapping[str, Any]) -> None:
        """Takes the next listed event."""
        if kind == EventType.EVAL_RECORDED:
            self._recorded(event)
        elif kind == EventType.CHECKPOINT_VOIDED:
            self.scores.pop(event["step"], None)
        elif kind in (EventType.RUN_STARTED, EventType.SETTINGS_CHANGED):
            self.spec |= event.get("spec") or {}

    def _recorded(self, event: Mapping[str, Any]) -> None:
        step, loss, score = event["step"], event.get("loss"), event.get("score")
        reason = "failed" if self.spec.get("recorded") else "left_out"
        sets = event.get("sets") or [{"name": "held_out", reason: event.get("left_out")}]
        counts = {s["name"]: (s.get("left_out") or 0, s.get("failed") or 0) for s in sets}
        told = [f"{n}{left_out_in_words(*of)}".lstrip("; ") for n, of in counts.items() if any(of)]
        self.left_out = f"evaluation after step {step}: {', '.join(told)}" if told else ""
        if (score := score if loss is None else -loss) is not None:
            self.scores[step] = score
