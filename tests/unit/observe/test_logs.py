"""``paceline logs``: the last lines, those that are added, and which logs there are."""

import os
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from paceline.errors import BadInput
from paceline.observe.file_tail import BLOCK, last_lines, log_files, new_lines
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


def test_last_lines_of_a_file_larger_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    lines = [f"{i:06d} " + "x" * 90 for i in range(3 * BLOCK // 97)]
    path.write_text("\n".join(lines) + "\nhalf")
    shown, offset = last_lines(path, 1500)
    assert shown == lines[-1500:]
    assert path.read_bytes()[offset:] == b"half"
    assert last_lines(path, 10**6)[0] == lines


def test_lines_are_followed_across_pieces_and_a_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("old\nsec")
    _, offset = last_lines(path, 0)

    def append(text: str) -> None:
        with path.open("a") as file:
            file.write(text)

    def replace() -> None:
        (tmp_path / "fresh").write_text("begun anew\n")
        (tmp_path / "fresh").rename(path)

    # What happens between two looks; after the last one the run is over.
    moves = [lambda: append("ond\nth"), lambda: append("ird\n"), replace, lambda: append("last")]

    def over() -> bool:
        if moves:
            moves.pop(0)()
            return False
        return True

    assert list(new_lines(path, offset, over)) == ["second", "third", "begun anew", "last"]


def test_following_ends_when_the_fleet_has_ended(run_dir: Path) -> None:
    mine = ProcessId.of(os.getpid())
    gone = ProcessId(mine.pid, mine.started - 1000)
    FleetRecord("tiny", supervisor=gone).write(run_dir)
    shown = logs("policy-0", "--run-dir", str(run_dir), "--follow")
    assert shown.exit_code == 0
    assert shown.output.splitlines()[-1] == "policy-0 three"
    assert psutil.pid_exists(mine.pid)
    assert list(log_files(run_dir)) == ["policy-0", "rollout-0", "rollout-1", "redis"]
