"""Estimators over the samples of one prompt: pass@k and majority voting.

All functions are pure and use no random number, so every process computes the same values.
"""

from __future__ import annotations

from collections.abc import Sequence


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Probability that at least one of ``k`` samples, drawn without replacement, is solved.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of n = ``samples`` with c = ``solved`` (Chen et
    al. 2021, arXiv 2107.03374, equation 1), as a product, which neither overflows nor cancels.
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= samples and 0 <= solved <= samples):
        raise ValueError(f"pass@{k} of {solved} solved samples out of {samples}")
    if samples - solved < k:
        return 1.0
    missed = 1.0
    for i in range(k):
        missed *= (samples - solved - i) / (samples - i)
    return 1.0 - missed


def reported_ks(samples: int) -> tuple[int, ...]:
    """The k of pass@k that are reported for ``samples`` samples: the powers of two below, and all
    of them."""
    powers = [1 << i for i in range(samples.bit_length())]
    return (*[k for k in powers if k < samples], samples)


def majority_answer(answers: Sequence[str]) -> str:
    """The answer that most samples gave; of equally frequent ones, the one given first. Empty
    answers have no vote; "" if there is no other."""
    votes: dict[str, int] = {}
    for answer in answers:
        if answer:
            votes[answer] = votes.get(answer, 0) + 1
    # max returns the first of equals, and the dictionary is in the order of first votes.
    return max(votes, key=votes.__getitem__, default="")


def majority_solved(answers: Sequence[str], solved: Sequence[bool]) -> float:
    """majority@k (maj@k, self-consistency; Wang et al. 2022, arXiv 2203.11171): 1 if the majority's
    answer is right, 0 if it is not or if no sample has an answer.

    A reward may judge samples of one answer differently, for example by their format: then it is
    the share of them that is solved. Raises ValueError unless both sequences have one length.
    """
    chosen = majority_answer(answers)
    verdicts = [s for a, s in zip(answers, solved, strict=True) if a == chosen]
    return sum(verdicts) / len(verdicts) if chosen else 0.0
