"""Stages of the RLHF example: their order, what each begins with, and that none is done twice or
from another's output."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.rlhf import __main__ as command
from examples.rlhf import runner, stages
from examples.rlhf.runner import StageFailed, run_all, run_stage
from examples.rlhf.stages import PIPELINES, STAGES, PipelineProblem, Place, place
from paceline.config.load import load_config


def finish(where: Place) -> None:
    """As ``paceline up`` leaves a run that has ended."""
    where.output.mkdir(parents=True)
    (where.output / "paceline.json").write_text(json.dumps({"checkpoint": where.stage.name}))
    (where.directory / "summary.json").write_text('{"status": "finished"}')


def of(name: str, root: Path, **given: Any) -> Place:
    return place(STAGES[name], root, short=False, given=given)


class Ran:
    """Commands that were run, in the place of ``paceline up``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, status: int = 0) -> None:
        self.commands: list[list[str]] = []
        self.status = status
        monkeypatch.setattr(runner, "_run", self.run)

    def run(self, where: Place, words: list[str], progress: object) -> int:
        self.commands.append(words)
        if not self.status:
            if where.stage.is_run:
                finish(where)
            else:
                where.directory.mkdir()
                where.output.write_text("{}\n")
        return self.status


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_stage_comes_after_those_that_it_begins_with(pipeline: str) -> None:
    done: set[str] = set()
    for stage in stages.chosen_stages(pipeline, []):
        assert set(stage.needs) <= done
        done.add(stage.name)


@pytest.mark.parametrize("name", [name for name, stage in STAGES.items() if stage.is_run])
@pytest.mark.parametrize("short", [False, True])
def test_the_settings_of_every_stage_are_those_of_a_run(
    name: str, short: bool, tmp_path: Path
) -> None:
    where = place(STAGES[name], tmp_path, short=short, given={})
    config = load_config(where.stage.config, [f"{n}={v}" for n, v in where.settings.items()])
    begun_from = config.model.path
    wanted = "examples/digit_sort/model-0.1M" if name == "sft" else f"{tmp_path}/sft/export"
    assert begun_from == wanted
    if name == "ppo":
        assert config.scorers.by_name["preference"].path == f"{tmp_path}/reward_model/export"
    assert runner.steps_of(where) == config.train.steps


def test_a_pipeline_runs_its_stages_once_and_a_second_start_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(monkeypatch)
    places = [of(name, tmp_path) for name in PIPELINES["ppo"]]
    run_all(places, print)
    assert [Path(words[-1]).name for words in ran.commands[:2]] == ["sft", "preferences"]
    assert len(ran.commands) == 4
    run_all(places, print)
    assert len(ran.commands) == 4
    assert "[4/4] ppo: is done already" in capsys.readouterr().out
    run_all([of(name, tmp_path) for name in PIPELINES["dpo"]], print)
    assert len(ran.commands) == 5, "DPO has SFT and preferences in common with it"


def test_a_stage_that_was_cut_is_begun_again_with_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, where = Ran(monkeypatch, status=1), of("sft", tmp_path)
    where.log.write_text("starting\nerror: no space left\n")
    with pytest.raises(StageFailed) as raised:
        run_stage(where, "[1/1] sft")
    said = str(raised.value)
    assert "no space left" in said and str(where.log) in said and "goes on with this stage" in said
    again = Ran(monkeypatch)
    run_stage(where, "[1/1] sft")
    assert again.commands == failed.commands and where.done


def test_a_run_that_ended_without_its_export_is_exported_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = of("sft", tmp_path)
    where.directory.mkdir()
    (where.directory / "summary.json").write_text('{"status": "finished"}')
    assert not where.done
    ran = Ran(monkeypatch)
    run_stage(where, "sft")
    (words,) = ran.commands
    assert words[1:] == ["export", str(where.directory), "--out", str(where.output)]


@pytest.mark.parametrize("summary", ['{"status": "interrupted"}', "{", "[]"])
def test_a_run_that_did_not_finish_is_not_done(tmp_path: Path, summary: str) -> None:
    where = of("sft", tmp_path)
    finish(where)
    assert where.done
    (where.directory / "summary.json").write_text(summary)
    assert not where.done and not where.finished_without_export


def test_a_stage_of_other_settings_or_inputs_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ran(monkeypatch)
    run_all([of(name, tmp_path) for name in PIPELINES["dpo"]], print)
    with pytest.raises(
        PipelineProblem, match=r"no setting of train\.optimizer\.lr, now it is = 1"
    ) as raised:
        run_all([of("dpo", tmp_path, **{"train.optimizer.lr": 1})], print)
    assert f"remove {tmp_path / 'dpo'} and {tmp_path / 'dpo.json'}" in str(raised.value)
    # SFT is done once more, and gives another model.
    (tmp_path / "sft/export/paceline.json").write_text('{"checkpoint": "another"}')
    with pytest.raises(PipelineProblem, match="another output of sft"):
        run_all([of("dpo", tmp_path)], print)


def test_a_start_waits_for_the_run_that_an_earlier_start_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command was killed, and its `paceline up` goes on: a second one of the run would be
    refused."""
    ran, where = Ran(monkeypatch), of("sft", tmp_path)
    where.directory.mkdir()
    lock = (where.directory / "supervisor.lock").open("a+")
    fcntl.flock(lock, fcntl.LOCK_EX)
    waits: list[float] = []

    def slept(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            finish(where)
            lock.close()

    monkeypatch.setattr(runner.time, "sleep", slept)
    run_stage(where, "sft")
    assert (len(waits), ran.commands) == (3, []), "the earlier one brought it to its end"


def test_two_commands_in_one_directory_are_refused(tmp_path: Path) -> None:
    with (
        runner.alone_in(tmp_path),
        pytest.raises(PipelineProblem, match="another command works in"),
        runner.alone_in(tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["dpo", "--stages", "reward_model"], "has no stage 'reward_model'"),
        (["--stages", "ppo"], "begins with the output of sft, which is not in"),
        (["--set", "train.optimizer.lr=1"], "no stage 'train' is to run"),
        (["--set", "ppo.train.optimizer.lr"], "write STAGE.SETTING=VALUE"),
    ],
)
def test_bad_input_is_named_before_anything_runs(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*words, "--dir", str(tmp_path / "new")]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_ctrl_c_reaches_the_stage_once_and_is_no_failure(tmp_path: Path) -> None:
    """The child says what it got, and ends as `paceline up` does."""
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: (print('told', flush=True), sys.exit(130)))\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "signal.pause()\n"
    )
    where = of("sft", tmp_path)
    with pytest.raises(runner.Interrupted):
        runner._run(where, [sys.executable, "-c", script], runner.Progress("sft"))
    assert where.log.read_text() == "told\n"


def test_ctrl_c_at_the_very_start_of_a_stage_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost on the stage, which has a session of its own, and went on alone."""
    started, start = [], subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        os.kill(os.getpid(), signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    where = of("sft", tmp_path)
    with pytest.raises(runner.Interrupted):
        runner._run(where, ["sleep", "600"], runner.Progress("sft"))
    assert started[0].poll() == -signal.SIGINT
