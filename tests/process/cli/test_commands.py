"""Exit statuses scripts can trust, one clear message for bad input, and a quick start."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import paceline
from paceline.errors import BadInput, Unreachable
from paceline.rpc.addresses import free_ports
from paceline_launcher.cli import app
from paceline_launcher.cli.common import Target
from paceline_launcher.cli.status import status_of
from testbed.patience import patient
from tests.fixtures.event_files import write_events
from tests.fixtures.golden import Golden
from tests.fixtures.rendered import ROOT


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group of the program, with the words that call it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


COMMANDS = dict(commands(get_command(app)))
WITHOUT_DATA = {
    *((role,) for role in ("controller", "policy", "rollout", "scorer", "serve")),
    *((name,) for name in ("demo", "init", "logs", "timeline", "top")),
    *(("alerts", "test"), ("plan", "memory"), ("import", "cosmos-rl"), ("config", "check")),
    *((name,) for name in ("scale", "drain", "pause", "resume", "checkpoint", "stop", "set")),
    *((name,) for name in ("export", "stacks", "check-reward", "check-objective")),
}
"""Processes that run, requests, views of people, and text that is made for a file."""
Command = Callable[..., subprocess.CompletedProcess[str]]


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, for a few of them: exit status and output are those of
    ``main``."""
    return subprocess.run(
        [sys.executable, "-m", "paceline_launcher", *arguments],
        capture_output=True,
        text=True,
        timeout=patient(60),
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{model}"\n[data]\npath = "{tmp_path / "rows.jsonl"}"\n')
    return path


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controllers that are not there are not waited for as long as those that may come back."""
    monkeypatch.setattr("paceline_launcher.cli.status.ANSWER_LIMIT_S", 0.3)
    monkeypatch.setattr("paceline_launcher.cli.samples.ANSWER_S", 0.3)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"])
    assert shown.exit_code == 0
    assert "Example: paceline" in shown.output
    assert "``" not in shown.output, "a name in brackets was taken for a style"
    example = next(line for line in shown.output.splitlines() if "Example: paceline" in line)
    words = example.partition("Example: paceline")[2].split()
    assert tuple(words[: len(command)]) == command


def test_every_command_that_prints_data_prints_it_as_json() -> None:
    assert len(COMMANDS) > 25
    plain = {
        path
        for path, command in COMMANDS.items()
        if not hasattr(command, "commands")
        and not any("--json" in option.opts for option in command.params)
    }
    assert plain == WITHOUT_DATA


def test_no_command_waits_for_torch() -> None:
    code = (
        "import sys; from paceline_launcher.cli import app; "
        "import paceline_launcher.launch.run, paceline_launcher.live_view, "
        "paceline.rpc.client; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


def test_config_check_prints_what_it_reads_back(paceline: Command, config: Path) -> None:
    check = ("config", "check", str(config))
    shown = paceline(*check, "--resolved", "--set", "train.steps=7")
    assert shown.returncode == 0
    assert "steps = 7" in shown.stdout
    config.write_text(shown.stdout)
    assert paceline(*check, "--resolved").stdout == shown.stdout
    assert paceline(*check).stdout == f"valid: {config}\n"
    warned = paceline(
        *(*check, "--set", "rollout.top_p=0.9", "--set"),
        "train.loss.mask_ratio_sequence=[0.5, 2.0]",
    )
    assert warned.returncode == 0 and "rollout.top_p = 0.9" in warned.stderr
    assert "warning" not in warned.stdout


GOLDEN = Golden("commands")


@pytest.fixture
def here(config: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present directory, with the files that cases of the golden file name."""
    here = config.parent
    monkeypatch.chdir(here)
    config.write_text('[model]\npath = "model"\n[data]\npath = "rows.jsonl"\n')
    for name in ("digit_sort", "qwen3_8b"):
        shutil.copy(ROOT / f"deploy/examples/{name}.toml", here)
    (here / "token").write_text("0123456789abcdef\n")
    (here / "token").chmod(0o600)
    texts = {
        **dict.fromkeys(("maths/config.toml", "maths/export/paceline.json"), ""),
        "maths/export/config.json": '{"architectures": ["Qwen3ForCausalLM"]}',
        "maths/checkpoints/step-000001/meta.json": "{}",
        "scores/config.json": '{"architectures": ["Qwen3ForSequenceClassification"]}',
        "damaged/config.json": "{",
        "unfinished/checkpoints/none": "",
    }
    for name, text in texts.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    return here


@pytest.mark.parametrize("case", GOLDEN.cases)
def test_bad_input_has_its_exit_status_and_one_message_and_makes_nothing(
    case: str, here: Path, paceline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "PACELINE_TOKEN", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "100")
    environment, _, words = case.partition("paceline ")
    for word in environment.split():
        monkeypatch.setenv(*word.split("=", 1))
    before = set(here.rglob("*"))
    done = paceline(*shlex.split(words))
    # But for the words of gRPC.
    said = re.sub(r" \(\S+: UNAVAILABLE .*", "", f"{done.stdout}{done.stderr}")
    GOLDEN.check(case, f"exit status {done.returncode}\n{said}".replace(f"{here}/", ""))
    assert done.returncode in (2, 3) and "Traceback" not in done.stderr
    assert set(here.rglob("*")) == before


def test_attach_without_a_fleet_and_a_dry_run_make_nothing(
    paceline: Command, config: Path, tmp_path: Path
) -> None:
    here = ("up", str(config), "--run-dir", str(run_dir := tmp_path / "run"))
    shown = paceline(*here, "--attach")
    assert shown.returncode == 2 and "no fleet runs in" in shown.stderr
    length = ("--set", "train.epochs=3", "--set", "train.steps=none")
    shown = process(*here, *length, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"run length: \d+ steps? of .* samples, .* epochs of \d+ rows?", shown.stdout)
    assert not run_dir.exists()


def ended_run(run_dir: Path) -> None:
    (run_dir / "controllers").mkdir()
    (port,) = free_ports("127.0.0.1", 1)
    address = {"address": f"127.0.0.1:{port}", "pid": 1}
    (run_dir / "controllers" / "controller-0.json").write_text(json.dumps(address))
    (run_dir / "summary.json").write_text('{"status": "finished", "steps": 5}')
    write_events(run_dir, {"type": "Paused", "paused": True})


def test_a_run_that_has_ended_is_answered_for_by_its_files_at_once(tmp_path: Path) -> None:
    """Nobody is asked: commands took 20 s, and ended in a traceback."""
    ended_run(tmp_path)
    here, began = ["--run-dir", str(tmp_path)], time.monotonic()
    followed = CliRunner().invoke(app, ["events", "--follow", "--json", *here])
    assert followed.exit_code == 0
    assert json.loads(followed.stdout)["type"] == "Paused"
    for command in (["events", "--follow", "--all"], ["pause"], ["top"]):
        refused = CliRunner().invoke(app, [*command, *here])
        assert "is not running: finished after 5 steps" in str(refused.exception)
        assert refused.exception.__cause__ is None, "one line in Python too"
    assert "finished, step" in CliRunner().invoke(app, ["status", *here]).stdout
    run = paceline.attach(tmp_path)
    assert run.status()["phase"] == "finished"
    assert [event["type"] for event in run.follow()] == ["Paused"]
    with pytest.raises(Unreachable, match="is not running: finished after 5 steps"):
        run.pause()
    assert time.monotonic() - began < 10


def test_events_of_a_run_directory_need_no_controller(paceline: Command, tmp_path: Path) -> None:
    begun = {"type": "TermBegun", "text": "c leads (term 7)"}
    write_events(tmp_path, {"type": "RunStarted"}, begun)
    shown = paceline("events", "--run-dir", str(tmp_path))
    assert shown.returncode == 0
    assert "c leads (term 7)" in shown.stdout
    assert re.match(r"19(69|70)-\d\d-\d\d ", shown.stdout), "of another day: with its date"
    every = paceline("events", "--run-dir", str(tmp_path), "--json")
    types = [json.loads(line)["type"] for line in every.stdout.splitlines()]
    assert types == ["RunStarted", "TermBegun"]
    (tmp_path / "events.jsonl").write_text('{"type": "Paused"}\nnonsense\n')
    damaged = paceline("events", "--run-dir", str(tmp_path), "--json")
    assert damaged.returncode == 2 and "line 2" in damaged.stderr


def test_a_reader_that_has_read_enough_is_no_failure(tmp_path: Path) -> None:
    line = json.dumps({"position": "1-0", "n": 0, "t": 1.0, "type": "Paused", "paused": True})
    (tmp_path / "events.jsonl").write_text(f"{line}\n" * 20_000)
    with subprocess.Popen(
        [sys.executable, "-m", "paceline_launcher", "events", "--run-dir", str(tmp_path), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as told:
        assert told.stdout is not None and told.stderr is not None
        assert json.loads(told.stdout.readline())["type"] == "Paused"
        told.stdout.close()
        assert told.wait(timeout=patient(60)) == 0
        assert told.stderr.read() == ""


def test_commands_options_and_values_are_completed() -> None:
    def complete(words: str) -> list[str]:
        """What bash would offer for the last of ``words``."""
        asked = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": words}
        asked["COMP_CWORD"] = str(words.count(" "))
        return CliRunner().invoke(app, [], prog_name="paceline", env=asked).stdout.split()

    assert complete("paceline lo") == ["logs"]
    assert {"--run-dir", "--follow"} <= set(complete("paceline events --"))
    assert complete("paceline init --algorithm d") == ["dr_grpo", "dapo", "decoupled", "dpo"]


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    root = tmp_path / "root.pem"
    root.write_text("no certificate")
    target = Target(controllers="127.0.0.1:1", tls_ca=root)
    with pytest.raises(BadInput, match=r"--tls-ca: .*root\.pem is no PEM file"):
        status_of(target)
