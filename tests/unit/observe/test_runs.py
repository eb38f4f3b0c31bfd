"""Commands about runs that are over: their states, curves side by side, events, the default run."""

import json
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import paceline
from paceline.errors import BadInput
from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.observe.projection import Projection
from paceline.observe.runs import find_runs, read_run
from paceline_launcher.cli import app
from tests.fixtures.event_files import write_events
from tests.fixtures.golden import Golden

GOLDEN = Golden("runs")


def last_changed(run_dir: Path, changed: float) -> None:
    for path in run_dir.iterdir():
        os.utime(path, (changed, changed))


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
    last_changed(where, changed)


def write_run(run_dir: Path, *, lr: float = 1e-4, steps: int = 3, end: str = "RunFinished") -> Path:
    """A run of two sessions with an hour between them, as its files tell of it."""
    run_dir.mkdir(parents=True)
    metrics = {"samples": 4.0, "step_s": 1.0}
    write_events(
        run_dir,
        {"type": "TermBegun", "t": 10.0},
        *(
            {"type": "StepCommitted", "t": 10.0 + n, "step": n, "text": f"step {n} committed"}
            | {"metrics": {"reward_mean": n / 10, **metrics}}
            for n in range(1, steps + 1)
        ),
        {"type": "WeightsNotLoaded", "severity": "warning", "text": "policy-0 died", "t": 20.0},
        {"type": "TermBegun", "t": 3620.0, "text": "controller-0 leads"},
        {"type": end, "t": 3630.0, "reason": "completed", "text": "over"},
    )
    settings = f"[train]\nsteps = {steps}\n[train.optimizer]\nlr = {lr}\n"
    (run_dir / "config.toml").write_text(settings)
    return run_dir


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def runs(here: Path) -> Path:
    finished = {"status": "finished", "steps": 3, "reward_first5": 0.1, "reward_last5": 0.3}
    failed = {"status": "failed", "reason": "policy-0 ended 20 times", "steps": 1, "wall_s": 65.0}
    make_run(here / "a", [0.1, 0.2, 0.3], 3000.0, **finished)
    make_run(here / "b", [0.5], 2000.0, **failed)
    make_run(here / "deeper" / "c", [0.2, 0.4], 1000.0)
    make_run(here / "markup" / "[red]x[", [0.5], 1.0)
    event = '{"type": "WorkerDied", "position": "9-0", "n": 1, "t": 4.0}'
    for changed, line in ((500.0, "nonsense"), (400.0, event)):
        make_run(run_dir := here / "damaged" / f"{changed}", [0.1, 0.2], changed)
        with (run_dir / "events.jsonl").open("a") as file:
            file.write(f"{line}\n")
        last_changed(run_dir, changed)
    (here / "notes").mkdir()
    last_changed(write_run(here / "over" / "one"), 9000.0)
    last_changed(write_run(here / "over" / "two", lr=5e-4, end="RunFailed"), 8000.0)
    return here


@pytest.mark.parametrize("case", GOLDEN.cases)
def test_runs_are_listed_newest_first_and_compared_or_refused(
    case: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged one hides none of the others, and the name of a directory is no markup."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr(sys, "executable", "/nowhere")  # no process of its own is asked
    told = invoke(*shlex.split(case)[1:])
    refused = told.exception if isinstance(told.exception, BadInput) else None
    said = str(refused) if refused else f"exit status {told.exit_code}\n{told.output}"
    GOLDEN.check(case, re.sub(r"\d+ d \d+ h ago", "long ago", said))


@pytest.mark.parametrize("summary", ["{", "[1]", '{"status": "failed", "steps": "many"}'])
def test_a_damaged_run_says_how_and_when_it_changed(here: Path, summary: str) -> None:
    make_run(here / "run", [0.1], 500.0)
    (here / "run" / "summary.json").write_text(summary)
    last_changed(here / "run", 700.0)
    (run,) = find_runs(here)
    assert (run.changed, run.steps) == (700.0, None)
    assert run.state == "failed" or ("summary.json" in run.reason and run.state == "damaged")


def test_a_run_whose_launcher_still_exports_says_so(here: Path) -> None:
    run_dir = write_run(here / "runs" / "one")
    FleetRecord("one", supervisor=ProcessId.of(os.getpid())).write(run_dir)
    (run_dir / "config.toml").write_text('[model]\npath = "m"\n[data]\npath = "d"\n')
    for command in ("why", "status"):
        told = invoke(command, "--run-dir", str(run_dir))
        assert told.exit_code == 0 and "exported" in told.stdout, told.exception


def test_a_run_whose_supervisor_lives_is_running(runs: Path) -> None:
    mine = ProcessId.of(os.getpid())
    FleetRecord("c", supervisor=mine).write(runs / "deeper" / "c")
    assert {run.name: run.state for run in find_runs(runs)}["c"] == "running"
    # Another process has its id now.
    FleetRecord("c", ProcessId(mine.pid, mine.started - 1000)).write(runs / "deeper" / "c")
    assert {run.name: run.state for run in find_runs(runs)}["c"] == "ended"


def test_a_run_without_a_supervisor_has_its_state_and_the_time_of_all_sessions(here: Path) -> None:
    run_dir = write_run(here / "run")
    (run_dir / "controllers").mkdir()
    run = read_run(run_dir)
    assert (run.state, run.steps) == ("finished", 3)
    assert run.wall_s == pytest.approx(20.0)
    going_on = write_run(here / "other", end="RunContinued")
    assert Projection.read(going_on).status == ""


def test_the_run_of_this_directory_needs_no_option(here: Path) -> None:
    assert invoke("events").exit_code != 0
    run_dir = write_run(here / "runs" / "one")
    (run_dir / "config.toml").write_text(
        '[run]\nname = "one"\n[model]\npath = "m"\n[data]\npath = "d"\n'
    )
    unknown = invoke("events", "--run-dir", str(run_dir), "--kind", "Tea")
    assert unknown.exit_code == 2 and "WorkerDied" in unknown.output
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "policy-0.log").write_text("begun\n")
    for command, words in (
        ("events", "policy-0 died"),
        ("logs", "policy-0"),
        ("ledger verify", "holds no Redis data"),
    ):
        done = invoke(*command.split())
        assert "run: runs/one" in done.stderr
        assert words in f"{done.stdout} {done.exception}"


def test_an_export_goes_on_to_the_checkpoint_that_a_running_run_has_written_meanwhile(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chosen one was deleted while torch was imported, and the command failed."""
    from paceline.observe.checkpoints import META
    from policy_worker.checkpoint import export

    run_dir = here / "run"
    run_dir.mkdir()

    def record(step: int) -> Path:
        path = run_dir / "checkpoints" / f"step-{step}"
        path.mkdir(parents=True)
        of_step = {"step": step, "version": step}
        recorded = {"type": "CheckpointRecorded", "path": str(path), **of_step}
        write_events(run_dir, {"type": "StepCommitted", **of_step}, recorded)
        return path

    written: list[str] = []

    def as_in_a_fast_run(checkpoint: Path, *_: Any, **__: Any) -> None:
        if not written:
            written.append("")
            checkpoint.rmdir()
            record(20)
            raise BadInput(f"{checkpoint}: no such checkpoint directory")
        written.append(checkpoint.name)

    monkeypatch.setattr(export, "export", as_in_a_fast_run)
    record(10)
    done = invoke("export", str(run_dir), "--out", str(here / "out"))
    assert done.exit_code == 0, done.exception
    assert written[1:] == ["step-20"]

    best = {"step": 20, "path": str(run_dir / "checkpoints/step-20"), "reward_mean": 0.5}
    write_events(run_dir, {"type": "BestCheckpointChosen", **best})
    record(30)
    for options, step in (((), "step-30"), (("--best",), "step-20")):
        invoke("export", str(run_dir), "--out", str(here / "out"), *options)
        assert written[-1] == step
    (run_dir / "checkpoints" / "step-30" / META).touch()
    one = str(run_dir / "checkpoints" / "step-30")
    refused = invoke("export", one, "--out", str(here / "out"), "--best")
    assert "is no run with a checkpoint that has a held-out reward" in str(refused.exception)


def test_a_run_that_is_over_answers_why_from_its_files(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")  # no process of its own is asked
    words = "the run has finished after step 3"
    assert words in paceline.attach(write_run(here / "run")).why()
