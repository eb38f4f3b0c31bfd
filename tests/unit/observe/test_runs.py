"""``paceline runs`` and ``paceline compare``: how runs ended, and their curves side by side."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.errors import BadInput
from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.observe.runs import find_runs
from paceline_launcher.cli import app


def make_run(
    where: Path, rewards: list[float], *, changed: float, summary: dict[str, Any] | None = None
) -> Path:
    """A run directory whose steps had ``rewards``; ``changed``: Unix seconds of its last line."""
    where.mkdir(parents=True)
    events = []
    for step, reward in enumerate(rewards, start=1):
        place = {"position": f"{step}-0", "n": 0, "t": float(step)}
        metrics = {"reward_mean": reward}
        events.append({**place, "type": "StepCommitted", "step": step, "metrics": metrics})
    place = {"position": f"{len(rewards) + 1}-0", "n": 0, "t": float(len(rewards))}
    events.append({**place, "type": "EvalRecorded", "step": 0, "reward_mean": rewards[0]})
    (where / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    if summary is not None:
        (where / "summary.json").write_text(json.dumps(summary))
    for path in where.iterdir():
        os.utime(path, (changed, changed))
    return where


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    finished = {"status": "finished", "steps": 3, "reward_first5": 0.1, "reward_last5": 0.3}
    failed = {"status": "failed", "reason": "policy-0 ended 20 times", "steps": 1, "wall_s": 65.0}
    make_run(tmp_path / "a", [0.1, 0.2, 0.3], changed=3000.0, summary=finished)
    make_run(tmp_path / "b", [0.5], changed=2000.0, summary=failed)
    make_run(tmp_path / "deeper" / "c", [0.2, 0.4], changed=1000.0)
    (tmp_path / "notes").mkdir()
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_runs_are_listed_newest_first_with_how_they_ended(runs: Path) -> None:
    listed = json.loads(invoke("runs", str(runs), "--json").output)
    assert [(run["name"], run["state"], run["steps"]) for run in listed] == [
        ("a", "finished", 3),
        ("b", "failed", 1),
        ("c", "ended", 2),
    ]
    # Without a summary the rows are read: the mean of two steps.
    assert listed[2]["reward_last5"] == pytest.approx(0.3)
    assert listed[2]["eval_first"] == 0.2
    shown = invoke("runs", str(runs)).output
    assert "failed: policy-0 ended 20 times" in shown
    assert "1 min 05 s" in shown


def test_a_run_whose_supervisor_lives_is_running(runs: Path) -> None:
    mine = ProcessId.of(os.getpid())
    FleetRecord("c", supervisor=mine).write(runs / "deeper" / "c")
    assert {run.name: run.state for run in find_runs(runs)}["c"] == "running"
    # Another process has its id now.
    FleetRecord("c", ProcessId(mine.pid, mine.started - 1000)).write(runs / "deeper" / "c")
    assert {run.name: run.state for run in find_runs(runs)}["c"] == "ended"


def test_numbers_and_curves_are_compared(runs: Path) -> None:
    both = [str(runs / "a"), str(runs / "deeper" / "c")]
    found = json.loads(invoke("compare", *both, "--json").output)
    assert [run["curve"] for run in found["runs"]] == [
        [[1, 0.1], [2, 0.2], [3, 0.3]],
        [[1, 0.2], [2, 0.4]],
    ]
    asked = invoke("compare", *both, "--json", "--metric", "eval_reward_mean")
    assert json.loads(asked.output)["runs"][0]["curve"] == [[0, 0.1]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a"], "two runs"),
        (["a", "nowhere"], "no run directory"),
        (["a", "notes"], "no run directory"),
        (
            ["a", "b", "--metric", "reward_men"],
            "Choose from: eval_count, eval_reward_mean, reward_mean",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(runs: Path, arguments: list[str], said: str) -> None:
    given = [str(runs / a) if a in ("a", "b", "nowhere", "notes") else a for a in arguments]
    refused = invoke("compare", *given)
    assert isinstance(refused.exception, BadInput)
    assert said in str(refused.exception)


def test_the_names_of_directories_are_no_markup(tmp_path: Path) -> None:
    make_run(tmp_path / "[red]x[", [0.5], changed=1.0)
    assert "[red]x[" in invoke("runs", str(tmp_path)).output


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense", "events.jsonl: line 4 is damaged"),
        (
            '{"type": "WorkerDied", "position": "9-0", "n": 1, "t": 4.0}',
            "events.jsonl: the event WorkerDied 9-0/1 is damaged",
        ),
    ],
)
def test_one_damaged_run_hides_none_of_the_others(runs: Path, line: str, reason: str) -> None:
    damaged = make_run(runs / "d", [0.1, 0.2], changed=500.0)
    with (damaged / "events.jsonl").open("a") as file:
        file.write(f"{line}\n")
    listed = json.loads(invoke("runs", str(runs), "--json").output)
    assert {run["name"]: run["state"] for run in listed} == {
        "a": "finished",
        "b": "failed",
        "c": "ended",
        "d": "damaged",
    }
    assert reason in listed[-1]["reason"]
    assert "damaged: " in invoke("runs", str(runs)).output
