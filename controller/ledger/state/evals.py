"""Evaluation rounds: the prompts of the sets that are due, sampled with the weights of a step or
newer.

A round's tasks ``e<step>.<row>`` are leased like training tasks and before them; their scores are
summed here and their payloads are not kept. The rows of a round are those of its first set, then
those of the next one.

A round's scores, of all of its sets, are of one version: the one that most of its rows were sampled
with. The first lease names a version, and as long as a worker serves it, only such workers get
rows. If they have all gone on to newer weights, or have died, the rest goes to others, so that a
round never waits for a version that is no more.
"""

from dataclasses import dataclass, field

from controller.ledger.specs import EvalSet
from paceline.evaluation import RowScore, SetScores
from paceline.ids import Step, Version

MIXED = Version(-1)  # In the place of a row's version: it has tokens of several


@dataclass(slots=True)
class Score:
    sets: dict[str, SetScores] = field(default_factory=dict)
    """By the set's name."""


@dataclass(slots=True)
class EvalRound:
    step: Step
    rows: int
    sets: tuple[EvalSet, ...]  # In the order of their rows
    pending: list[int] = field(default_factory=list)  # Rows that wait for a lease, ascending
    open: int = 0  # Rows not yet scored or dropped
    version: Version | None = None
    """Version of the engine that took the newest row; None before the first one."""
    scores: dict[Version, Score] = field(default_factory=dict)
    """By the version of a row's tokens; MIXED for several versions, or one in doubt."""
    doubtful: list[Version] = field(default_factory=list)
    """Versions whose weights may be those of a replica that was outvoted: their rows, scored or
    still to come, count with those of several versions."""

    def place(self, row: int) -> tuple[EvalSet, int]:
        """The set of ``row``, and the row's index in it."""
        for each in self.sets:
            if row < each.rows:
                return each, row
            row -= each.rows
        raise IndexError(row)

    def score(self, row: int, score: RowScore, version: Version) -> None:
        self.open -= 1
        of, _ = self.place(row)
        sets = self.scores.setdefault(version, Score()).sets
        sets.setdefault(of.name, SetScores(of.samples)).add(score)

    def scored(self, name: str) -> int:
        """Rows of a set that were scored, with whatever version."""
        return sum(s.sets[name].rows for s in self.scores.values() if name in s.sets)

    @property
    def most_scored(self) -> Version | None:
        """The version of most rows, the older of two, that is in no doubt; None: there is none."""
        versions = sorted(self.scores.keys() - {MIXED, *self.doubtful})
        rows = {v: sum(x.rows for x in self.scores[v].sets.values()) for v in versions}
        return max(rows, key=rows.__getitem__, default=None)

    def counted_as(self, oldest: Version, newest: Version) -> Version:
        """In ``scores``: a row whose tokens are of these versions and those between."""
        return MIXED if oldest != newest or oldest in self.doubtful else oldest


@dataclass(slots=True)
class Evals:
    rounds: dict[Step, EvalRound] = field(default_factory=dict)  # Under way, by step
    done: dict[Step, int] = field(default_factory=dict)  # Rows of every finished round, by step
    scores: dict[Step, float] = field(default_factory=dict)
    """The value that ranks a round (RunSpec.judging), of every finished round that has it."""

    @property
    def best(self) -> Step:
        """Round with the highest score, the first of equals; -1: none has a score."""
        return max(sorted(self.scores), key=self.scores.__getitem__, default=Step(-1))

    @property
    def since_best(self) -> int:
        """Rounds with a score of later steps. One of many rows may end after the next one."""
        best = self.best
        return sum(step > best for step in self.scores)

    def end(self, step: Step, score: float | None) -> None:
        """``score``: None if nothing ranks the round."""
        self.done[step] = self.rounds.pop(step).rows
        if score is not None:
            self.scores[step] = score

    def disown(self, step: Step, version: Version) -> None:
        """``version``, the weights after ``step``, may have been scored on an outvoted replica."""
        for round_ in self.rounds.values():  # one of an earlier step may go on with these weights
            round_.doubtful.append(version)
        self.scores.pop(step, None)

    def rows_of(self, step: Step) -> int:
        """Rows of the round of ``step``, under way or finished."""
        return self.rounds[step].rows if step in self.rounds else self.done.get(step, 0)
