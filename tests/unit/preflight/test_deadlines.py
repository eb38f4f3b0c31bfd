"""A dead mount or a hub that does not answer is named by every command that checks a run, and
blocks none."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline_launcher.cli import app

pytestmark = [pytest.mark.timeout(300), pytest.mark.heavy]  # each waits for a deadline

COMMANDS = ("config check", "up --dry-run", "doctor", "up")


@contextmanager
def blocked(path: Path) -> Iterator[None]:
    """open() of ``path`` blocks, as on a dead mount: somebody else holds a lease on it. The kernel
    breaks the lease after /proc/sys/fs/lease-break-time, 45 s."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(file)
        signal.signal(signal.SIGIO, before)


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline_launcher.preflight.machine.ANSWER_S", 0.5)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "token").write_text("a" * 32)
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    (run_dir / "summary.json").write_text("{}")
    path = tmp_path / "run.toml"
    path.write_text(
        f'[run]\nname = "one"\n[model]\npath = "{model}"\ndevice = "cpu"\n[reward]\nprocesses = 0\n'
        f'[data]\npath = "{tmp_path / "rows.jsonl"}"\n[fleet]\ncontrollers = 1\n'
        f'[auth]\ntoken_file = "{tmp_path / "token"}"\n'
    )
    return path


PLACES = {
    "data set": ("rows.jsonl", "data.path"),
    "model": ("model/config.json", "model.path"),
    "earlier run": ("runs/one/summary.json", "--run-dir"),
    "token": ("token", "auth.token_file"),
}


@pytest.mark.parametrize(
    ("command", "place"),
    [*(("up", place) for place in PLACES), *((command, "model") for command in COMMANDS[:-1])],
)
def test_a_dead_mount_is_named_by_every_command(
    command: str, place: str, config_file: Path, tmp_path: Path
) -> None:
    name, setting = PLACES[place]
    with blocked(tmp_path / name):
        result = CliRunner().invoke(app, [*command.split(), str(config_file)])
    told = " ".join(f"{result.output} {result.exception or ''}".split())
    # The directory of the model or of the run is what the setting names.
    path = str(tmp_path / name).removesuffix("/config.json").removesuffix("/summary.json")
    path = path.replace(f"{tmp_path}/runs", "runs")
    assert f"{setting}: {path}" in told and "mount" in told, told
    assert "does not answer" in told and result.exit_code != 0, told


def test_a_checkpoint_to_begin_with_on_a_dead_mount_is_named(
    config_file: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "meta.json").write_text("{}")
    with blocked(checkpoint / "meta.json"):
        result = CliRunner().invoke(app, ["up", str(config_file), "--from", str(checkpoint)])
    assert f"--from: {checkpoint} does not answer" in str(result.exception), result.output


@pytest.fixture
def deaf_hub() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_hub_that_does_not_answer_is_named_for_the_model_and_the_data(
    config_file: Path, tmp_path: Path, deaf_hub: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    begun = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "paceline_launcher", "config", "check", str(config_file)),
            *("--set", "model.path=nobody/no-such-model"),
            *("--set", "data.path=nobody/no-such-data"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment | {"HF_ENDPOINT": deaf_hub, "HF_HOME": str(tmp_path / "hf")},
    )
    print(done.stderr, time.monotonic() - begun)
    assert done.returncode == 2
    for line in ("model.path: nobody/no-such-model", "data.path: nobody/no-such-data"):
        (told,) = [said for said in done.stderr.splitlines() if line in said]
        assert f"the hub {deaf_hub} does not answer" in told and "HF_ENDPOINT" in told, told
