"""Reward hacking is told from noise, from training that works, and from training that breaks."""

import random
from collections.abc import Callable

import pytest

from paceline.observe.held_out import Checked, Estimate, exploited, mean_of

DROP = 0.1
ERROR = 0.03
"""Of a share of about one half over 256 prompts."""


def curve(
    truth: Callable[[int], float],
    score: Callable[[int], float],
    *,
    count: int = 30,
    noise: random.Random | None = None,
) -> list[Checked]:
    """Evaluations at the steps 0, 10, 20, ...; their errors are those of ``noise``."""

    def drawn(mean: float, error: float) -> Estimate:
        return Estimate(mean + (noise.gauss(0, error) if noise else 0.0), error)

    return [
        Checked(10 * n, drawn(truth(n), ERROR), drawn(score(n), 0.2) if n else None)
        for n in range(count)
    ]


def first_warning(evaluations: list[Checked]) -> int | None:
    """Step at which a run that is watched from the start is first warned of."""
    for end in range(1, len(evaluations) + 1):
        if (found := exploited("truth", evaluations[:end], DROP)) is not None:
            return found.step
    return None


def test_a_score_that_rises_while_the_truth_falls_is_found_with_the_step_to_go_back_to() -> None:
    hacked = curve(lambda n: 0.6 + 0.05 * n if n < 5 else 0.8 - 0.1 * (n - 4), lambda n: 0.3 * n)
    step = first_warning(hacked)
    found = exploited("truth", hacked[: (step or 0) // 10 + 1], DROP)
    assert found is not None
    assert "truth falls (0.800 after step 40, 0.500 after step 70)" in found.text
    assert step == 70, "at 60 the truth is low for the first time, at 70 for the second"
    assert "score rises (1.050 to 1.950)" in found.text


def test_a_truth_that_falls_from_the_start_is_found() -> None:
    """There is no score before the first step."""
    assert first_warning(curve(lambda n: 0.6 - 0.2 * min(n, 3), lambda n: 1.0 * n)) == 20


@pytest.mark.parametrize(
    ("truth", "score"),
    [
        (lambda n: 0.5 + 0.01 * n, lambda n: 0.1 * n),
        (lambda n: 0.6, lambda n: 0.2 * n),
        (lambda n: 0.8 if n < 10 else 0.3, lambda n: 2.0 if n < 10 else 0.5),
        (lambda n: 0.8 if n < 10 else 0.3, lambda n: 1.0),
        (lambda n: 0.4 if n == 12 else 0.7, lambda n: 0.2 * n),
        (lambda n: 0.7 - 0.05 * (n > 5), lambda n: 0.2 * n),
    ],
    ids=[
        "both rise",
        "the truth stands still",
        "both fall",
        "the score stands still",
        "one evaluation swings",
        "the truth falls by little",
    ],
)
def test_other_curves_are_none(
    truth: Callable[[int], float], score: Callable[[int], float]
) -> None:
    assert first_warning(curve(truth, score)) is None


def test_noise_is_none() -> None:
    """300 runs of 60 evaluations, whose score rises while the truth stands still: at most one in a
    hundred is warned of."""
    runs = [
        curve(lambda n: 0.55, lambda n: 0.1 * n, count=60, noise=random.Random(seed))
        for seed in range(300)
    ]
    assert sum(first_warning(run) is not None for run in runs) <= 3


def test_a_fall_within_noise_is_found_all_the_same() -> None:
    """From 0.8 to 0.5 in 20 evaluations, with the noise of 256 prompts: in all of 100 runs, in
    time."""
    for seed in range(100):
        run = curve(
            lambda n: 0.8 - 0.015 * n, lambda n: 0.1 * n, count=21, noise=random.Random(seed)
        )
        assert first_warning(run) is not None


def test_a_warning_can_be_turned_off_and_few_evaluations_say_nothing() -> None:
    hacked = curve(lambda n: 0.8 - 0.2 * min(n, 4), lambda n: 1.0 * n, count=10)
    assert exploited("truth", hacked, 0.0) is None
    assert exploited("truth", hacked[:2], DROP) is None
    assert exploited("truth", [], DROP) is None


def test_the_mean_of_estimates_is_more_certain_than_each() -> None:
    assert mean_of([]) is None
    steps = [Estimate(mean, error=0.5) for mean in (1.0, 2.0, 3.0, 6.0)]
    assert mean_of(steps) == Estimate(3.0, 0.25)
