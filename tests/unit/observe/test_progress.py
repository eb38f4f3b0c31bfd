"""Reward bars and the time left: what they are made of, and what must not mislead them."""

from __future__ import annotations

import pytest

from paceline.observe.progress import Progress, duration, shrink, sparkline
from paceline.v1 import admin_pb2


def status(step: int, total: int = 100, /, **metrics: float) -> admin_pb2.StatusReply:
    reply = admin_pb2.StatusReply(phase="running", step=step, total_steps=total)
    reply.metrics.update(metrics)
    return reply


def test_bars_go_from_the_lowest_to_the_highest() -> None:
    assert sparkline([float(i) for i in range(8)]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 1.0]) == "█▁"
    assert sparkline([0.25, 0.25]) == "▁▁"
    assert sparkline([]) == ""


def test_a_long_run_fits_the_line_and_keeps_its_mean() -> None:
    values = [float(i) for i in range(1000)]
    spans = shrink(values, 48)
    assert len(spans) <= 48
    assert spans == sorted(spans)
    assert shrink([1.0, 2.0], 48) == [1.0, 2.0]
    assert shrink([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]


def test_time_left_is_not_misled_by_one_step_that_waited_out_a_fault() -> None:
    progress = Progress()
    for step in range(1, 21):
        progress.add(step, {"reward_mean": 0.1, "step_s": 600.0 if step == 15 else 2.0})
    assert progress.seconds_left(20, 50) == pytest.approx(60.0)
    assert progress.seconds_left(50, 50) == 0.0
    assert Progress().seconds_left(0, 50) is None


def test_steps_that_were_rolled_back_are_forgotten() -> None:
    progress = Progress()
    for step in range(1, 6):
        progress.add(step, {"reward_mean": float(step), "step_s": 1.0})
    # The rolled-back run still reports the metrics of the step that was undone.
    progress.observe(status(2, step=5.0, reward_mean=5.0))
    assert progress.rewards(10) == [1.0, 2.0]
    progress.observe(status(3, step=3.0, reward_mean=30.0))
    assert progress.rewards(10) == [1.0, 2.0, 30.0]


def test_a_status_seen_twice_counts_once_and_one_without_rewards_not_at_all() -> None:
    progress = Progress()
    for _ in range(2):
        progress.observe(status(1, reward_mean=0.5, step_s=2.0))
    progress.observe(status(2))
    progress.observe(status(3, reward_mean=float("nan")))
    assert progress.rewards(10) == [0.5]
    assert "0.5" in progress.line(status(1))


def test_the_line_tells_the_time_left_only_while_it_runs() -> None:
    progress = Progress()
    progress.add(1, {"reward_mean": 0.0, "step_s": 3.0})
    progress.add(2, {"reward_mean": 1.0, "step_s": 3.0})
    assert progress.line(status(2, 42)) == "▁█  0 to 1   2 min 00 s left"
    over = status(2, 42)
    over.phase = "finished"
    assert progress.line(over) == "▁█  0 to 1"
    assert Progress().line(status(0)) == "-"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.4, "0 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.9, "1 h 00 min"),
        (7620, "2 h 07 min"),
        (273_600, "3 d 04 h"),
    ],
)
def test_durations_are_told_in_two_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said
