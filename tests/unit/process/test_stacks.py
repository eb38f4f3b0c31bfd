"""Stacks of processes that cannot speak for themselves."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner

from paceline.errors import BadInput
from paceline.process.kernel_state import kernel_state
from paceline.process.stacks import _grown, read_stacks, stacks_file
from paceline_launcher.cli import app

ROOT = Path(__file__).resolve().parents[3]
HOLDS_THE_LOCK = """
import sys
from pathlib import Path
from paceline.process.stacks import install

install(Path(sys.argv[1]), "worker-7")

def holds_the_interpreter_lock():
    print("ready", flush=True)
    # One call into C that never gives the lock away.
    return "a" * 60 in "a" * 59 + "b" or sum(range(10**12))

holds_the_interpreter_lock()
"""


@contextmanager
def process(run_dir: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, str(run_dir), "worker-7"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as started:
        try:
            assert started.stdout is not None and started.stdout.readline() == "ready\n"
            yield started
        finally:
            started.kill()


def test_a_process_that_holds_the_interpreter_lock_writes_its_stacks_until_it_is_stopped(
    tmp_path: Path,
) -> None:
    run_dir = ["--run-dir", str(tmp_path)]
    with process(tmp_path, HOLDS_THE_LOCK) as started:
        found = read_stacks(tmp_path, "worker-7", started.pid)
        assert "holds_the_interpreter_lock" in found.text, found.note
        # And again: only the newest are shown.
        shown = CliRunner().invoke(app, ["stacks", "worker-7", *run_dir])
        assert shown.exit_code == 0
        assert shown.output.count("most recent call first") == found.text.count(
            "most recent call first"
        )
        assert stacks_file(tmp_path, "worker-7", started.pid).stat().st_mode & 0o077 == 0
        refused = CliRunner().invoke(app, ["stacks", "worker", *run_dir]).exception
        assert isinstance(refused, BadInput) and "paceline status" in str(refused)
        os.kill(started.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, started.pid, os.WSTOPPED)
        stopped = read_stacks(tmp_path, "worker-7", started.pid)
        assert not stopped.text
        assert "stopped" in stopped.note and f"kill -CONT {started.pid}" in stopped.note


def test_files_of_earlier_processes_of_the_name_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    with process(tmp_path, HOLDS_THE_LOCK) as living:
        others = [stacks_file(tmp_path, name, gone.pid) for name in ("worker-7", "worker-7.b")]
        for path in others:
            path.touch()
        with process(tmp_path, HOLDS_THE_LOCK) as newest:
            kept = {path.name for path in (tmp_path / "stacks").iterdir()}
            names = [f"worker-7.{p.pid}.txt" for p in (living, newest)]
            assert kept == {*names, others[1].name}


def test_a_process_without_the_handler_is_not_ended_by_the_question(tmp_path: Path) -> None:
    with process(tmp_path, "print('ready', flush=True); import time; time.sleep(600)") as started:
        stacks_file(tmp_path, "worker-7", started.pid).parent.mkdir()
        stacks_file(tmp_path, "worker-7", started.pid).touch()
        found = read_stacks(tmp_path, "worker-7", started.pid)
        assert not found.text and "starting" in found.note
        assert started.poll() is None


def test_another_process_with_that_id_is_not_signalled(tmp_path: Path) -> None:
    found = read_stacks(tmp_path, "worker-7", os.getpid())
    assert not found.text and "no process" in found.note


def test_the_kernels_word_is_read_despite_a_strange_name(tmp_path: Path) -> None:
    home = tmp_path / "7"
    home.mkdir()
    (home / "stat").write_text("7 (a) b (c) D 1 7 7 0")
    found = kernel_state(7, root=tmp_path)
    assert found is not None and found.uninterruptible and not found.stopped
    assert found.words == "in an uninterruptible wait"
    assert kernel_state(8, root=tmp_path) is None


def test_a_file_that_others_fill_is_not_read_whole(tmp_path: Path) -> None:
    (tmp_path / "stacks").write_bytes(b"x" * (1 << 20))
    assert len(_grown(tmp_path / "stacks", 0)) == 1 << 18
