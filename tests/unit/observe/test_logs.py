"""``paceline logs``: the last lines, those that are added, and which logs there are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from paceline.errors import BadInput
from paceline.observe.file_tail import log_files
from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline_launcher.cli import app


def logs(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["logs", *arguments])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    for name in ("policy-0", "rollout-0", "rollout-1"):
        (tmp_path / "logs" / f"{name}.log").write_text(f"{name} one\n{name} two\n{name} three\n")
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "redis.log").write_text("ready\n")
    return tmp_path


def test_the_last_lines_of_a_process(run_dir: Path) -> None:
    shown = logs("policy-0", "--run-dir", str(run_dir), "-n", "2")
    assert shown.exit_code == 0
    assert shown.output.splitlines() == ["policy-0 two", "policy-0 three"]
    assert logs("redis", "--run-dir", str(run_dir)).output == "ready\n"
    assert logs("policy-0", "--run-dir", str(run_dir), "-n", "0").output == ""


@pytest.mark.parametrize("name", ["rolout-0", "../summary", "/etc/passwd", "policy-0.log", ".."])
def test_a_name_of_no_process_is_no_path_and_refused_with_those_there_are(
    run_dir: Path, name: str
) -> None:
    shown = logs(name, "--run-dir", str(run_dir))
    assert isinstance(shown.exception, BadInput)
    assert "policy-0, rollout-0, rollout-1, redis" in str(shown.exception)


def test_lines_are_followed_over_a_replaced_file_until_the_supervisor_has_ended(
    run_dir: Path,
) -> None:
    path = run_dir / "logs" / "policy-0.log"
    script = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as supervisor:
        FleetRecord("tiny", supervisor=ProcessId.of(supervisor.pid)).write(run_dir)
        words = ["logs", "policy-0", "--run-dir", str(run_dir), "-f", "-n", "1"]
        command = [sys.executable, "-m", "paceline_launcher", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            assert following.stdout.readline() == "policy-0 three\n"
            with path.open("a") as file:
                file.write("second\n")
            assert following.stdout.readline() == "second\n"
            (run_dir / "fresh").write_text("begun anew\n")
            (run_dir / "fresh").rename(path)
            assert following.stdout.readline() == "begun anew\n"
            with path.open("a") as file:
                file.write("last")
            supervisor.communicate()
            assert following.stdout.read() == "last\n"
        assert following.returncode == 0


def test_following_goes_on_with_a_launcher_that_takes_the_fleet_over(run_dir: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    words = [sys.executable, "-m", "paceline_launcher", "logs", "policy-0"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as first,
        subprocess.Popen(command, stdin=subprocess.PIPE) as second,
    ):
        FleetRecord("tiny", supervisor=ProcessId.of(first.pid)).write(run_dir)
        words += ["--run-dir", str(run_dir), "-f", "-n", "1"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            assert following.stdout.readline() == "policy-0 three\n"
            FleetRecord("tiny", supervisor=ProcessId.of(second.pid)).write(run_dir)
            first.communicate()
            time.sleep(1.5)
            with (run_dir / "logs" / "policy-0.log").open("a") as file:
                file.write("taken over\n")
            assert following.stdout.readline() == "taken over\n"
            second.communicate()
            assert following.stdout.read() == ""
        assert following.returncode == 0


def test_following_ends_when_the_fleet_has_ended(run_dir: Path) -> None:
    mine = ProcessId.of(os.getpid())
    gone = ProcessId(mine.pid, mine.started - 1000)
    FleetRecord("tiny", supervisor=gone).write(run_dir)
    shown = logs("policy-0", "--run-dir", str(run_dir), "--follow")
    assert shown.exit_code == 0
    assert shown.output.splitlines()[-1] == "policy-0 three"
    assert psutil.pid_exists(mine.pid)
    assert list(log_files(run_dir)) == ["policy-0", "rollout-0", "rollout-1", "redis"]
