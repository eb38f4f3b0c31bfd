"""A run in Python, from its start to what it has written."""

import ast
import asyncio
import contextlib
import re
import tomllib
from pathlib import Path
from typing import Any

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


def page(tmp_path: Path) -> list[list[ast.stmt]]:
    """The statements of each example of docs/python.md, of a shorter run in another directory."""
    text = (DIGIT_SORT.parents[2] / "docs" / "python.md").read_text()
    for there, here in (('{"train.steps": 60}', "SETTINGS"), ("runs/try1", str(tmp_path / "run"))):
        assert there in text
        text = text.replace(there, here)
    return [ast.parse(code).body for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


def test_a_run_is_started_watched_steered_and_read_as_the_page_says(tmp_path: Path) -> None:
    names: dict[str, Any] = {"SETTINGS": SETTINGS}
    (*watches, waits), reads = page(tmp_path)

    def follow(*statements: ast.stmt) -> Any:
        exec(compile(ast.Module([*statements], []), "docs/python.md", "exec"), names)
        return names["run"]

    try:
        run = follow(*watches)
        assert run.state == "running" and "policy-0" in str(run.status())
        run.pause()
        assert run.why()
        with pytest.raises(paceline.RunFailed, match="did not start"):
            config = tomllib.loads(DIGIT_SORT.read_text())
            paceline.start(config, run_dir=tmp_path / "run", settings=SETTINGS)
        with pytest.raises(UserError, match="refused"):
            run.scale({"scorer:none": 2})
        # A notebook's cell runs within an event loop.
        asyncio.run(shorten(run))
        run.resume()
        follow(waits)
    finally:
        with contextlib.suppress(UserError, KeyError):
            names["run"].stop()
    again = follow(*reads)
    summary = again.summary()
    assert again.state == summary["status"] == "finished"
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
