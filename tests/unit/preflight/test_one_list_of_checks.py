"""One list of checks: config check, --dry-run, doctor and the start refuse the same mistakes.

A refused start leaves the disk as it was."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from paceline.config.load import changeable, load_config, to_toml
from paceline.rpc.addresses import free_ports
from paceline_launcher.cli import app
from paceline_launcher.cli.up import steps_to_extend_to
from paceline_launcher.preflight import checks, machine
from paceline_launcher.preflight.checks import Check, Place, run_checks
from paceline_launcher.preflight.findings import Start
from tests.fixtures.event_files import write_events
from tests.fixtures.preflight import findings_of

COMMANDS = ("config check", "doctor", "up --dry-run", "up")


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    # No test asks the hub.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    (model / "tokenizer_config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n')
    path = tmp_path / "run.toml"
    path.write_text(
        f'[run]\nname = "one"\n[model]\npath = "{model}"\ndevice = "cpu"\n'
        f'[data]\npath = "{tmp_path / "rows.jsonl"}"\n[fleet]\ncontrollers = 1\n'
    )
    yield path


MISTAKES = {
    "missing data": ("data.path=nowhere.jsonl", "nowhere.jsonl"),
    "bad JSON": ("data.path=broken.jsonl", "broken.jsonl"),
    "wrong field": ("data.prompt_field=question", "question"),
    "missing reward module": ('reward.functions=["no_such_module:reward"]', "no_such_module"),
    "reachable without a token": ("controller.host=0.0.0.0", "0.0.0.0"),
    "missing token file": ("auth.token_file=no-token", "no-token"),
    "misspelt model": ("model.path=modle", "Did you mean the directory model?"),
}


def said_by(command: str, config: Path, *options: str) -> Result:
    words = [*command.split(), str(config)]
    return CliRunner().invoke(app, words + [part for o in options for part in ("--set", o)])


def told(result: Result) -> str:
    """Output and error of a command in one line."""
    return " ".join(f"{result.output} {result.exception or ''}".split())


def files(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def assert_refused(command: str, config: Path, option: str, words: str, at: Path) -> None:
    before = files(at)
    result = said_by(command, config, option)
    assert words in told(result), told(result)
    assert result.exit_code not in (0, None) or result.exception is not None
    assert files(at) == before


# Every mistake once, and every command on the two that lie furthest apart.
CASES = [("config check", mistake) for mistake in MISTAKES] + [
    (command, mistake)
    for command in COMMANDS[1:]
    for mistake in ("missing data", "reachable without a token")
]


@pytest.mark.parametrize(("command", "mistake"), CASES)
def test_a_mistake_is_found_by_every_command(
    command: str, mistake: str, config_file: Path, tmp_path: Path
) -> None:
    option, words = MISTAKES[mistake]
    assert_refused(command, config_file, option, words, tmp_path)


@pytest.fixture
def earlier_run(config_file: Path, tmp_path: Path) -> Path:
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text(to_toml(load_config(config_file)))
    (run_dir / "events.jsonl").write_text("")
    (run_dir / "summary.json").write_text(json.dumps({"status": "interrupted", "steps": 7}))
    return run_dir


@pytest.mark.parametrize("command", COMMANDS)
def test_a_resume_with_another_config_is_refused_by_every_command(
    command: str, config_file: Path, earlier_run: Path, tmp_path: Path
) -> None:
    words = "rollout.group_size is 8 in the run, 4 here"
    assert_refused(command, config_file, "rollout.group_size=4", words, tmp_path)


def test_a_resume_of_a_finished_run_or_with_fewer_steps_than_are_trained_is_refused(
    config_file: Path, earlier_run: Path, tmp_path: Path
) -> None:
    """The fleet started, and its failure replaced the run's record."""
    summary = earlier_run / "summary.json"
    interrupted = summary.read_text()
    summary.write_text(json.dumps({"status": "finished", "steps": 100}))
    assert_refused("up", config_file, "run.seed=0", "is finished (100 steps)", tmp_path)
    summary.write_text(interrupted)
    write_events(earlier_run, *({"type": "StepCommitted", "step": n} for n in range(1, 8)))
    words = "has trained 7 steps already, and train.steps allows 6"
    assert_refused("up", config_file, "train.steps=6", words, tmp_path)
    allowed = said_by("up --dry-run", config_file, "train.steps=7")
    assert "allows" not in told(allowed), told(allowed)


@pytest.mark.parametrize(
    ("value", "trained", "edited", "extends_to"),
    [
        (801, 150, [], 0),
        (801, 150, ["train.steps=120"], 0),
        (7, 7, [], 0),
        (9, 9, ["train.steps=12"], 12),
    ],
)
def test_what_was_set_while_a_run_ran_stays_if_the_file_is_unchanged(
    value: int,
    trained: int,
    edited: list[str],
    extends_to: int,
    config_file: Path,
    earlier_run: Path,
) -> None:
    """The same command continues it: the file's 100 steps were refused, or waited for."""
    file = changeable(load_config(config_file))
    write_events(
        earlier_run,
        {"type": "RunStarted", "settings": file},
        {"type": "SettingsChanged", "changes": {"train.steps": [100, value]}, "configured": {}},
        *({"type": "StepCommitted", "step": n} for n in range(1, trained + 1)),
        *([{"type": "RunFinished", "reason": "completed"}] if trained == value else []),
    )
    config = load_config(config_file, edited)
    assert steps_to_extend_to(config, earlier_run) == extends_to
    said = told(said_by("up --dry-run", config_file, *edited))
    assert ("train.steps stays 801" in said) == (value == 801 and not edited), said
    assert ("has trained 150 steps already" in said) == (value == 801 and bool(edited)), said


@pytest.mark.parametrize("command", ["config check", "doctor"])
def test_a_check_that_belongs_to_other_machines_says_so(command: str, config_file: Path) -> None:
    result = said_by(command, config_file, "fleet.provider=kubernetes", "data.path=nowhere.jsonl")
    assert "fleet.provider is kubernetes" in told(result)
    assert "nowhere.jsonl: " not in told(result)


def test_a_check_that_its_disk_or_server_keeps_waiting_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ""

    def waits(start: Start) -> Iterator[Any]:
        nonlocal said
        while not said:
            time.sleep(0.01)
            said = capfd.readouterr().err
        yield from ()

    monkeypatch.setattr(checks, "SLOW_S", 0.05)
    monkeypatch.setattr(checks, "CHECKS", (Check("data", Place.MACHINE, waits),))
    assert list(run_checks(Start(None, Path()), Place.MACHINE)) == []
    assert "checking data" in said


@pytest.mark.heavy  # a process of its own, which reads HF_ENDPOINT as it begins
def test_a_hub_that_does_not_answer_is_named(config_file: Path, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    check = [sys.executable, "-m", "paceline_launcher", "config", "check", str(config_file)]
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(64)
        hub = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        done = subprocess.run(
            [*check, "--set", "model.path=nobody/no-such-model"],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=environment | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf")},
        )
    assert done.returncode == 2
    (line,) = [said for said in done.stderr.splitlines() if "model.path: nobody/" in said]
    assert f"the hub {hub} does not answer" in line and "HF_ENDPOINT" in line, line


def test_settings_can_be_checked_alone(config_file: Path) -> None:
    words = ["config", "check", str(config_file), "--set", "data.path=nowhere", "--settings-only"]
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize("provider", ["none", "ray"])
def test_controllers_start_here_if_something_else_starts_the_workers(
    provider: str, config_file: Path, tmp_path: Path
) -> None:
    config = load_config(config_file, [f"fleet.provider={provider}"])
    start = Start(config, tmp_path / "run", here=True)
    control = list(run_checks(start, Place.ANYWHERE | Place.CONTROL))
    assert not [finding for finding in control if finding.state == "fail"]
    assert {"redis", "data"} <= {finding.name for finding in control}
    everything = run_checks(start, Place.ANYWHERE | Place.CONTROL | Place.WORKERS)
    assert [f.name for f in everything if f.state == "fail"] == ["provider"]


def test_a_machine_that_runs_the_tests_is_fit_and_every_complaint_has_a_remedy(
    config_file: Path, tmp_path: Path
) -> None:
    found = findings_of(load_config(config_file, ["reward.processes=0"]), run_dir=tmp_path)
    fit = {"python", "devices", "redis", "model", "data", "settings"}
    assert [c for c in found if c.name in fit and c.state != "ok"] == []
    assert fit | {"vllm", "shared memory", "disk"} <= {c.name for c in found}
    assert all(c.found and (c.state == "ok" or c.remedy) for c in found)


def test_wrong_inputs_and_a_dead_redis_fail(config_file: Path) -> None:
    (free,) = free_ports("127.0.0.1", 1)
    sets = ["--set", f"redis.url=redis://127.0.0.1:{free}/0"]
    sets += ["--set", "data.prompt_field=nothing"]
    shown = CliRunner().invoke(app, ["doctor", str(config_file), "--json", *sets])
    assert shown.exit_code == 1
    found = json.loads(shown.output)
    assert found["ok"] is False
    failed = {c["name"]: c for c in found["checks"] if c["state"] == "fail"}
    assert str(free) in failed["redis"]["remedy"]
    assert "nothing" in failed["data"]["found"]


def test_a_disk_without_room_for_a_journal_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "DISK_FAIL", 1 << 60)
    (check,) = findings_of(None, "disk", run_dir=tmp_path / "new" / "run")
    assert check.state == "fail" and str(tmp_path) in check.found and "--run-dir" in check.remedy
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    (check,) = findings_of(None, "disk", run_dir=tmp_path / "file" / "run")
    assert check.state == "fail" and "nothing can be written in" in check.found


def test_a_cuda_run_on_a_machine_without_a_gpu_fails(config_file: Path, tmp_path: Path) -> None:
    import torch

    config = load_config(config_file, ["model.device=cuda"])
    (check,) = findings_of(config, "devices", run_dir=tmp_path)
    assert check.state == ("ok" if torch.cuda.is_available() else "fail")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("rollout.engine=vllm", 'rollout.engine = "vllm"'),
        ("model.compile=true", "model.compile"),
        ("model.attention=flex", 'model.attention = "flex"'),
        ("model.attention=sdpa", ""),
    ],
)
def test_what_triton_compiles_needs_a_c_compiler(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, setting: str, named: str
) -> None:
    start = Start(load_config(config_file, [setting]), config_file.parent)
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setenv("PATH", str(config_file.parent))
    assert list(machine.compiler(start)) == []
    monkeypatch.delenv("CC")
    found = list(machine.compiler(start))
    assert [(f.state, f.found.partition(":")[0]) for f in found] == (
        [("fail", named)] if named else []
    )
    monkeypatch.setattr(machine, "DRIVER", config_file)
    by_itself = [
        f.state
        for f in machine.compiler(Start(load_config(config_file, ["model.device=auto"]), Path()))
    ]
    assert by_itself == ["warn"], "what is compiled by default on a GPU goes on without, slowly"
    # A start runs it.
    names = [f.name for f in run_checks(start, Place.WORKERS) if f.state == "fail"]
    assert ("C compiler" in names) == bool(named)
