"""Estimators of evaluations against enumeration and values computed by hand."""

import math
import random
import statistics
from itertools import combinations

import pytest

from paceline.evaluation import (
    SetScores,
    majority_solved,
    pass_at_k,
    reported_ks,
    row_score,
)


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_solved_sample(samples: int) -> None:
    for solved in range(samples + 1):
        outcomes = [True] * solved + [False] * (samples - solved)
        for k in range(1, samples + 1):
            subsets = list(combinations(outcomes, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(samples, solved, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_samples() -> None:
    exact = 1 - math.comb(990, 500) / math.comb(1000, 500)
    assert pass_at_k(1000, 10, 500) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("wrong", [(4, 2, 5), (4, 2, 0), (4, 5, 2), (4, -1, 2), (0, 0, 1)])
def test_pass_at_k_of_impossible_counts_is_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*wrong)


def test_reported_ks_are_the_powers_of_two_and_all_samples() -> None:
    assert [reported_ks(n) for n in (1, 2, 4, 6)] == [(1,), (1, 2), (1, 2, 4), (1, 2, 4, 6)]


def test_a_majority_counts_if_its_answer_is_solved() -> None:
    assert majority_solved(["7", "8", "8"], [True, False, False]) == 0.0
    assert majority_solved(["7", "8", "8"], [False, True, True]) == 1.0
    assert majority_solved(["7", "8", "8", "7"], [True, False, False, True]) == 1.0
    assert majority_solved(["8", "8", "8"], [True, False, True]) == pytest.approx(2 / 3)
    assert majority_solved(["", "8", "7", ""], [False, True, False, False]) == 1.0, "the first"
    assert majority_solved(["", ""], [True, True]) == majority_solved([], []) == 0.0
    with pytest.raises(ValueError):
        majority_solved(["7"], [True, False])


def test_metrics_of_a_set_by_hand() -> None:
    scores = SetScores(samples=4)
    scores.add(row_score([1.0, 0.0, 0.0, 1.0], ["a", "b", "b", "a"], [3, 4, 5, 8], 1, 1.0))
    scores.add(row_score([0.0, 0.0, 0.5, 0.0], ["a", "b", "c", "c"], [1, 1, 1, 1], 0, 1.0))
    assert scores.metrics() == pytest.approx(
        {
            "reward": (0.5 + 0.125) / 2,
            "reward_se": statistics.stdev([0.5, 0.125]) / math.sqrt(2),
            "pass@1": 0.25,
            "pass@2": (5 / 6) / 2,
            "pass@4": 0.5,
            "maj@4": 0.5,
            "tokens": 24 / 8,
            "truncated": 1 / 8,
        }
    )
    assert SetScores(samples=4).metrics() == {}


def test_the_standard_error_is_that_of_the_prompts_and_the_order_does_not_matter() -> None:
    rng = random.Random(3)
    rewards = [[float(rng.random() < 0.4) for _ in range(3)] for _ in range(50)]
    rows = [row_score(r, [], [1] * 3, 0, 1.0) for r in rewards]
    found = []
    for order in (rows, rows[::-1]):
        scores = SetScores(samples=3)
        for row in order:
            scores.add(row)
        found.append(scores.metrics())
    expected = statistics.stdev(statistics.fmean(r) for r in rewards) / math.sqrt(50)
    assert found[0]["reward_se"] == pytest.approx(expected)
    assert found[0] == pytest.approx(found[1])


def test_a_weighted_sum_that_is_rounded_down_counts_as_solved() -> None:
    assert 0.7 + 0.2 + 0.1 < 1.0
    assert row_score([0.7 + 0.2 + 0.1], [], [1], 0, 1.0).solved == 1


def test_one_sample_has_no_majority() -> None:
    scores = SetScores()
    scores.add(row_score([1.0], [], [2], 0, 1.0))
    assert list(scores.metrics()) == ["reward", "reward_se", "pass@1", "tokens", "truncated"]
    assert scores.metrics()["reward_se"] == 0.0
