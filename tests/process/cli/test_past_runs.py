"""Commands about runs that are over: events in few lines, comparisons, states, the default run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import paceline
from paceline.errors import BadInput
from paceline.observe.projection import Projection
from paceline.observe.runs import read_run
from paceline_launcher.cli import app
from tests.fixtures.event_files import write_events


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def write_run(run_dir: Path, *, lr: float = 1e-4, steps: int = 3, end: str = "RunFinished") -> Path:
    """A run of two sessions with an hour between them, as its files tell of it."""
    run_dir.mkdir(parents=True)
    events: list[dict[str, Any]] = [{"type": "TermBegun", "t": 10.0, "severity": "info"}]
    rows = []
    for step in range(1, steps + 1):
        metrics = {"reward_mean": step / 10, "samples": 4.0, "step_s": 1.0}
        events.append({"type": "StepCommitted", "t": 10.0 + step, "step": step, "metrics": metrics})
        rows.append({"kind": "step", "step": step, "version": step, "t": 10.0 + step, **metrics})
    died = {"type": "WeightsNotLoaded", "severity": "warning", "text": "policy-0 died", "t": 20.0}
    resumed = {"type": "TermBegun", "t": 3620.0, "severity": "info", "text": "controller-0 leads"}
    events += [died, resumed, {"type": end, "t": 3630.0, "reason": "completed", "text": "over"}]
    head = ({"position": f"{n}-0", "n": 0} for n in range(1, 100))
    lines = [{**next(head), "text": f"step {e.get('step')} committed", **e} for e in events]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    row_head = ({"position": f"{n}-0", "n": 0} for n in range(2, 100))
    text = "".join(json.dumps({**next(row_head), **row}) + "\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(text)
    settings = f"[train]\nsteps = {steps}\n[train.optimizer]\nlr = {lr}\n"
    (run_dir / "config.toml").write_text(settings)
    return run_dir


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_committed_steps_do_not_drown_the_other_events(here: Path) -> None:
    run_dir = write_run(here / "run", steps=30)
    shown = invoke("events", "--run-dir", str(run_dir)).stdout
    assert "step 30 committed" not in shown
    assert len(shown.splitlines()) == 4
    faults = invoke("events", "--run-dir", str(run_dir), "--faults").stdout
    assert "policy-0 died" in faults and len(faults.splitlines()) == 1
    one_kind = invoke("events", "--run-dir", str(run_dir), "--kind", "StepCommitted").stdout
    assert len(one_kind.splitlines()) == 30
    unknown = invoke("events", "--run-dir", str(run_dir), "--kind", "Tea")
    assert unknown.exit_code == 2 and "WorkerDied" in unknown.output


def test_a_comparison_prints_the_numbers_and_the_settings(here: Path) -> None:
    one, two = write_run(here / "a"), write_run(here / "b", lr=5e-4)
    done = invoke("compare", str(one), str(two))
    assert done.exit_code == 0, done.output
    assert "last reward_mean" in done.output
    assert "train.optimizer.lr" in done.stdout and "0.0005" in done.stdout
    assert "train.steps" not in done.stdout


def test_a_run_without_a_supervisor_has_its_state_and_the_time_of_all_sessions(here: Path) -> None:
    run_dir = write_run(here / "run")
    (run_dir / "controllers").mkdir()
    run = read_run(run_dir)
    assert (run.state, run.steps) == ("finished", 3)
    assert run.wall_s == pytest.approx(20.0)
    going_on = write_run(here / "other", end="RunContinued")
    assert Projection.read(going_on).status == ""


def test_the_run_of_this_directory_needs_no_option(here: Path) -> None:
    done = invoke("events")
    assert done.exit_code != 0
    run_dir = write_run(here / "runs" / "one")
    (run_dir / "config.toml").write_text(
        '[run]\nname = "one"\n[model]\npath = "m"\n[data]\npath = "d"\n'
    )
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
    from paceline.observe.checkpoint_links import META
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


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("RunFinished", 0, "the run has finished after step 3"),
        ("RunFailed", 1, "the run has failed after step 3: completed"),
    ],
)
def test_a_run_that_is_over_answers_why_from_its_files(
    here: Path, monkeypatch: pytest.MonkeyPatch, end: str, status: int, words: str
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")  # no process of its own is asked
    run_dir = write_run(here / "run", end=end)
    told = invoke("why", "--run-dir", str(run_dir))
    assert told.exit_code == status and words in told.stdout
    as_json = json.loads(invoke("why", "--run-dir", str(run_dir), "--json").stdout)
    assert words in as_json["answers"][0]["sentence"]
    assert words in paceline.attach(run_dir).why()
