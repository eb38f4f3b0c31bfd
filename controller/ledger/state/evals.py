"""Evaluation rounds: the held-out prompts, sampled greedily once with the weights of a step or newer.

A round's tasks ``e<step>.<row>`` are leased like training tasks and before them; their scores are
summed here and their payloads are not kept.

A round's score is of one version: the one that most of its rows were sampled with. The first lease names
a version, and as long as a worker serves it, only such workers get rows. If they have all gone on to newer
weights, or have died, the rest goes to others, so that a round never waits for a version that is no more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from paceline.ids import Step, Version

MIXED = Version(-1)
"""In the place of a row's version: it has tokens of several."""


@dataclass(slots=True)
class Score:
    reward_sum: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.reward_sum / self.count


@dataclass(slots=True)
class EvalRound:
    step: Step
    rows: int
    pending: list[int] = field(default_factory=list)
    """Rows that wait for a lease, ascending."""
    open: int = 0
    """Rows not yet scored or dropped."""
    version: Version | None = None
    """Of the engine that took the newest row; None before the first one."""
    scores: dict[Version, Score] = field(default_factory=dict)
    """By the version of all of a row's tokens; MIXED for rows with tokens of several."""

    @property
    def most_scored(self) -> Version | None:
        """The version of most rows, the older one of two; None if no row has a single version."""
        versions = sorted(v for v in self.scores if v != MIXED)
        return max(versions, key=lambda v: self.scores[v].count, default=None)


@dataclass(slots=True)
class Evals:
    rounds: dict[Step, EvalRound] = field(default_factory=dict)
    """Under way, by step."""
    done: dict[Step, int] = field(default_factory=dict)
    """Rows of every finished round, by step."""
    scores: dict[Step, float] = field(default_factory=dict)
    """Mean held-out reward of every finished round in which a row was scored."""
    best: Step = Step(-1)
    """Round with the highest reward, the first of equals; -1: none."""
    since_best: int = 0
    """Rounds with a reward since then."""
    fallen: bool = False
    """The newest reward is far below the best one: see RunSpec.eval_drop."""

    def record(self, step: Step, reward: float, drop: float) -> None:
        """``drop``: share of the best reward from which a smaller one counts as fallen; 0: never."""
        self.scores[step] = reward
        self._rank(drop)

    def disown(self, step: Step, drop: float) -> None:
        """The weights that were scored after ``step`` may be those of a replica that was outvoted."""
        if step in self.rounds:
            self.rounds[step].scores.clear()  # a score needs most of the rows
        if self.scores.pop(step, None) is not None:
            self._rank(drop)

    def _rank(self, drop: float) -> None:
        """By step: a round of many rows may end after the one of a later step."""
        steps = sorted(self.scores)
        if not steps:
            self.best, self.since_best, self.fallen = Step(-1), 0, False
            return
        self.best = max(steps, key=self.scores.__getitem__)
        self.since_best = len(steps) - 1 - steps.index(self.best)
        best = self.scores[self.best]
        self.fallen = drop > 0 and best - self.scores[steps[-1]] > drop * abs(best)

    def knows(self, step: Step, row: int) -> bool:
        """Whether ``e<step>.<row>`` was ever a task."""
        rows = self.rounds[step].rows if step in self.rounds else self.done.get(step, 0)
        return 0 <= row < rows

    def lease(self, step: Step, row: int, version: Version) -> None:
        round_ = self.rounds[step]
        round_.version = version
        del round_.pending[bisect_left(round_.pending, row)]

    def release(self, step: Step, row: int) -> None:
        insort(self.rounds[step].pending, row)

    def score(self, step: Step, reward: float, version: Version) -> None:
        round_ = self.rounds[step]
        round_.open -= 1
        score = round_.scores.setdefault(version, Score())
        score.reward_sum += reward
        score.count += 1

    def drop(self, step: Step, row: int) -> None:
        round_ = self.rounds[step]
        round_.open -= 1
        if row in round_.pending:
            round_.pending.remove(row)
