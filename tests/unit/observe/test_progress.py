"""Reward bars and the time left: what they are made of, and what must not mislead them."""

import pytest

from paceline.observe.curves import Progress
from paceline.v1 import admin_pb2


def status(step: int, total: int = 100, /, **metrics: float) -> admin_pb2.StatusReply:
    reply = admin_pb2.StatusReply(phase="running", step=step, total_steps=total)
    reply.metrics.update(metrics)
    return reply


def test_time_left_is_not_misled_by_one_step_that_waited_out_a_fault() -> None:
    progress = Progress()
    for step in range(1, 21):
        progress.metrics.append({"step": step, "step_s": 600.0 if step == 15 else 2.0})
    assert progress.seconds_left(20, 50) == pytest.approx(60.0)
    assert progress.seconds_left(50, 50) == 0.0
    assert Progress().seconds_left(0, 50) is None


def test_steps_that_were_rolled_back_are_forgotten() -> None:
    progress = Progress()
    for step in range(1, 6):
        progress.metrics.append({"step": step, "reward_mean": float(step)})
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
