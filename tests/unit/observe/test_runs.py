"""``paceline runs`` and ``paceline compare``: how runs ended, and their curves side by side."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.errors import BadInput
from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.observe.runs import find_runs
from paceline_launcher.cli import app
from tests.fixtures.event_files import write_events
from tests.fixtures.golden import Golden

GOLDEN = Golden("runs")


def make_run(where: Path, rewards: list[float], changed: float, **summary: Any) -> None:
    """A run directory whose steps had ``rewards``; ``changed``: Unix seconds of its last line."""
    where.mkdir(parents=True)
    steps = [
        {"type": "StepCommitted", "step": step, "metrics": {"reward_mean": reward}}
        for step, reward in enumerate(rewards, start=1)
    ]
    write_events(where, *steps, {"type": "EvalRecorded", "step": 0, "reward_mean": rewards[0]})
    if summary:
        (where / "summary.json").write_text(json.dumps(summary))
    for path in where.iterdir():
        os.utime(path, (changed, changed))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    finished = {"status": "finished", "steps": 3, "reward_first5": 0.1, "reward_last5": 0.3}
    failed = {"status": "failed", "reason": "policy-0 ended 20 times", "steps": 1, "wall_s": 65.0}
    make_run(tmp_path / "a", [0.1, 0.2, 0.3], 3000.0, **finished)
    make_run(tmp_path / "b", [0.5], 2000.0, **failed)
    make_run(tmp_path / "deeper" / "c", [0.2, 0.4], 1000.0)
    make_run(tmp_path / "markup" / "[red]x[", [0.5], 1.0)
    event = '{"type": "WorkerDied", "position": "9-0", "n": 1, "t": 4.0}'
    for changed, line in ((500.0, "nonsense"), (400.0, event)):
        make_run(run_dir := tmp_path / "damaged" / f"{changed}", [0.1, 0.2], changed)
        with (run_dir / "events.jsonl").open("a") as file:
            file.write(f"{line}\n")
        os.utime(file.name, (changed, changed))
    (tmp_path / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", GOLDEN.cases)
def test_runs_are_listed_newest_first_and_compared_or_refused(
    case: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged one hides none of the others, and the name of a directory is no markup."""
    monkeypatch.setenv("COLUMNS", "160")
    told = CliRunner().invoke(app, shlex.split(case)[1:])
    error = told.exception if isinstance(told.exception, BadInput) else ""
    GOLDEN.check(case, re.sub(r"\d+ d \d+ h ago", "long ago", f"{told.output}{error}"))


def test_a_run_whose_supervisor_lives_is_running(runs: Path) -> None:
    mine = ProcessId.of(os.getpid())
    FleetRecord("c", supervisor=mine).write(runs / "deeper" / "c")
    assert {run.name: run.state for run in find_runs(runs)}["c"] == "running"
    # Another process has its id now.
    FleetRecord("c", ProcessId(mine.pid, mine.started - 1000)).write(runs / "deeper" / "c")
    assert {run.name: run.state for run in find_runs(runs)}["c"] == "ended"
