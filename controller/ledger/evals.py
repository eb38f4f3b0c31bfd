"""Evaluation rounds: the held-out prompts, sampled greedily once with the weights of a step or newer.

A round's tasks ``e<step>.<row>`` are leased like training tasks and before them; their scores are
summed here and their payloads are not kept.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from paceline.ids import Step


@dataclass(slots=True)
class EvalRound:
    step: Step
    rows: int
    pending: list[int] = field(default_factory=list)
    """Rows that wait for a lease, ascending."""
    open: int = 0
    """Rows not yet scored or dropped."""
    reward_sum: float = 0.0
    count: int = 0


@dataclass(slots=True)
class Evals:
    rounds: dict[Step, EvalRound] = field(default_factory=dict)
    """Under way, by step."""
    done: dict[Step, int] = field(default_factory=dict)
    """Rows of every finished round, by step."""

    def knows(self, step: Step, row: int) -> bool:
        """Whether ``e<step>.<row>`` was ever a task."""
        rows = self.rounds[step].rows if step in self.rounds else self.done.get(step, 0)
        return 0 <= row < rows

    def lease(self, step: Step, row: int) -> None:
        pending = self.rounds[step].pending
        del pending[bisect_left(pending, row)]

    def release(self, step: Step, row: int) -> None:
        insort(self.rounds[step].pending, row)

    def score(self, step: Step, reward: float) -> None:
        round_ = self.rounds[step]
        round_.open -= 1
        round_.reward_sum += reward
        round_.count += 1

    def drop(self, step: Step, row: int) -> None:
        round_ = self.rounds[step]
        round_.open -= 1
        if row in round_.pending:
            round_.pending.remove(row)
