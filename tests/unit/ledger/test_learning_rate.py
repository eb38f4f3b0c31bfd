"""Learning rates of steps, by hand."""

import math
from typing import Any

import pytest

from controller.ledger.specs import LearningRate
from paceline.ids import Step


def rates(**settings: Any) -> list[float]:
    rate = LearningRate(1.0, **settings)
    return [rate.at(Step(step), 8) for step in range(1, 9)]


def test_schedules_by_hand() -> None:
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    linear = rates(warmup_steps=4, schedule="linear")
    assert linear == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25])
    cosine = rates(warmup_steps=4, schedule="cosine", min_ratio=0.1)
    assert cosine[3] == cosine[4] == 1
    assert cosine[6] == pytest.approx(0.1 + 0.9 * 0.5)
    assert cosine[7] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(0.75 * math.pi)))
    assert rates(warmup_steps=8, schedule="cosine")[-1] == 1


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 8])
def test_no_step_of_a_run_has_a_learning_rate_of_zero(schedule: str, warmup: int) -> None:
    assert min(rates(schedule=schedule, warmup_steps=warmup)) > 0
    assert LearningRate(1.0, schedule).at(Step(1), 1) > 0
