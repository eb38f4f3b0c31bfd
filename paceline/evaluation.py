"""Scores of an evaluation set: estimators over the samples of a prompt, and their means over
prompts.

Pure, and without random numbers: every process computes the same values.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

ROUNDING = 1e-9
"""A weighted sum of rewards may be this much below the reward that counts as solved."""


@dataclass(frozen=True, slots=True)
class RowScore:
    """Scores of the samples of one prompt: their mean reward, and sums."""

    compact = True

    reward_mean: float
    samples: int = 1
    solved: int = 0
    majority: float = 0.0
    tokens: int = 0
    truncated: int = 0


def row_score(
    rewards: Sequence[float],
    answers: Sequence[str],
    lengths: Sequence[int],
    truncated: int,
    solved_at: float,
) -> RowScore:
    """The score of a prompt. ``answers``: one for each sample ("" is none), or none if nobody
    votes."""
    solved = [reward >= solved_at - ROUNDING for reward in rewards]
    return RowScore(
        reward_mean=math.fsum(rewards) / len(rewards),
        samples=len(rewards),
        solved=sum(solved),
        majority=majority_solved(answers, solved) if answers else 0.0,
        tokens=sum(lengths),
        truncated=truncated,
    )


@dataclass(slots=True)
class SetScores:
    """Sums over the scored prompts of a set, in any order. ``samples``: of each prompt."""

    samples: int = 1
    rows: int = 0
    reward_sum: float = 0.0
    reward_squares: float = 0.0
    passed: dict[str, float] = field(default_factory=dict)
    """Sum of pass@k over the prompts, by k as text."""
    majority: float = 0.0
    tokens: int = 0
    truncated: int = 0

    def add(self, row: RowScore) -> None:
        self.rows += 1
        self.reward_sum += row.reward_mean
        self.reward_squares += row.reward_mean**2
        for k in reported_ks(self.samples):
            value = pass_at_k(row.samples, row.solved, k)
            self.passed[str(k)] = self.passed.get(str(k), 0.0) + value
        self.majority += row.majority
        self.tokens += row.tokens
        self.truncated += row.truncated

    def metrics(self) -> dict[str, float]:
        """Means over the prompts; reward_se is the standard error with prompts as independent
        draws."""
        if not self.rows:
            return {}
        samples = self.rows * self.samples
        found = {"reward": self.reward_sum / self.rows, "reward_se": self._standard_error()}
        found |= {f"pass@{k}": total / self.rows for k, total in self.passed.items()}
        if self.samples > 1:
            found[f"maj@{self.samples}"] = self.majority / self.rows
        return found | {"tokens": self.tokens / samples, "truncated": self.truncated / samples}

    def _standard_error(self) -> float:
        if self.rows < 2:
            return 0.0
        squares = self.reward_squares - self.reward_sum**2 / self.rows
        return math.sqrt(max(0.0, squares) / (self.rows - 1) / self.rows)


def row_metrics(samples: int) -> dict[str, Callable[[RowScore], float]]:
    """The metrics of a set that may choose the best checkpoint, each with its value for one prompt:
    higher is better."""

    def passed(k: int) -> Callable[[RowScore], float]:
        return lambda row: pass_at_k(row.samples, row.solved, k)

    found: dict[str, Callable[[RowScore], float]] = {"reward": lambda row: row.reward_mean}
    found |= {f"pass@{k}": passed(k) for k in reported_ks(samples)}
    return found | ({f"maj@{samples}": lambda row: row.majority} if samples > 1 else {})


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Probability that one of ``k`` samples, drawn without replacement, is solved: the unbiased
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1). Raises ValueError.
    """
    if not (1 <= k <= samples and 0 <= solved <= samples):
        raise ValueError(f"pass@{k} of {solved} solved samples out of {samples}")
    return 1.0 - math.prod((samples - solved - i) / (samples - i) for i in range(k))


def reported_ks(samples: int) -> tuple[int, ...]:
    """The k of pass@k that are reported: powers of two below ``samples``, and all of them."""
    powers = [1 << i for i in range(samples.bit_length())]
    return (*[k for k in powers if k < samples], samples)


def majority_solved(answers: Sequence[str], solved: Sequence[bool]) -> float:
    """maj@k (self-consistency; Wang et al. 2022, arXiv 2203.11171): the solved share of the samples
    with the most frequent answer, of equals the first. A reward may judge them differently by their
    format. "" is no answer; without any, 0."""
    # Counter keeps the order of first votes, and most_common is stable.
    votes = Counter(filter(None, answers)).most_common(1)
    verdicts = [s for a, s in zip(answers, solved, strict=True) if votes and a == votes[0][0]]
    return sum(verdicts) / len(verdicts) if verdicts else 0.0
