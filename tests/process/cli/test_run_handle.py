"""A run in Python, from its start to what it has written."""

import asyncio
import contextlib
import tomllib
from pathlib import Path

import pytest

import paceline
from paceline.errors import BadInput, UserError

DIGIT_SORT = Path(__file__).parents[3] / "examples" / "digit_sort" / "digit_sort.toml"


SETTINGS = {
    "train.steps": 200,
    "train.groups_per_step": 2,
    "train.eval_limit": 8,
    "train.optimizer.warmup_steps": 0,
    "fleet.controllers": 1,
    "fleet.policy": 1,
    "fleet.rollout": 1,
    "redis.port": 0,
    "rest.port": 0,
}


def test_a_run_is_started_watched_steered_and_read(tmp_path: Path) -> None:
    config = tomllib.loads(DIGIT_SORT.read_text())
    run = paceline.start(config, run_dir=tmp_path / "run", settings=SETTINGS)
    try:
        for event in run.follow():
            if event["type"] == "StepCommitted":
                break
        assert run.state == "running" and "policy-0" in str(run.status())
        run.pause()
        assert run.why()
        with pytest.raises(paceline.RunFailed, match="did not start"):
            paceline.start(config, run_dir=tmp_path / "run", settings=SETTINGS)
        with pytest.raises(UserError, match="refused"):
            run.scale({"scorer:none": 2})
        # A notebook's cell runs within an event loop.
        asyncio.run(shorten(run))
        run.resume()
        summary = run.wait(300)
    finally:
        with contextlib.suppress(UserError):
            run.stop()
    assert summary["status"] == "finished"
    again = paceline.attach(tmp_path / "run")
    assert again.state == "finished" and again.summary() == summary
    frame = again.metrics().frame()
    assert len(frame) == summary["steps"] and frame["reward_mean"].notna().all()
    assert {"RunStarted", "StepCommitted"} <= {event["type"] for event in again.events()}
    (group,) = again.samples(limit=1)
    assert group["prompt"] and group["completions"]


async def shorten(run: paceline.RunHandle) -> None:
    step = int(run.status()["step"])
    run.set({"train.steps": step + 15})  # steps whose groups are there are made meanwhile


def test_what_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(paceline.RunFailed, match=r"train\.stepz"):
        paceline.start(DIGIT_SORT, run_dir=tmp_path / "run", settings={"train.stepz": 3})


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no run directory"):
        paceline.attach(tmp_path)
