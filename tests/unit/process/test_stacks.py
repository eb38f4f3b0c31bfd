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
from paceline.observe.fleet_file import FleetRecord, ProcessId, ProcessRecord
from paceline.process.kernel_state import kernel_state
from paceline.process.stacks import _grown, read_stacks
from paceline_launcher.cli import app

ROOT = Path(__file__).resolve().parents[3]
HOLDS_THE_LOCK = """
from paceline.process.stacks import install

install()

def holds_the_interpreter_lock():
    print("ready", flush=True)
    # One call into C that never gives the lock away.
    return "a" * 60 in "a" * 59 + "b" or sum(range(10**12))

holds_the_interpreter_lock()
"""


@contextmanager
def process(log: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        ) as started,
    ):
        try:
            assert started.stdout is not None and started.stdout.readline() == "ready\n"
            yield started
        finally:
            started.kill()


def test_a_process_that_holds_the_interpreter_lock_writes_its_stacks_until_it_is_stopped(
    tmp_path: Path,
) -> None:
    run_dir, log = ["--run-dir", str(tmp_path)], tmp_path / "worker-7.log"
    with process(log, HOLDS_THE_LOCK) as started:
        ids = [ProcessId.of(started.pid)]
        record = FleetRecord("run", ids[0])
        record.processes = [ProcessRecord("worker-7", "rollout", str(log), ids=ids)]
        record.write(tmp_path)
        text, note = read_stacks(started.pid, log)
        assert "holds_the_interpreter_lock" in text, note
        # And again: only the newest are shown.
        shown = CliRunner().invoke(app, ["stacks", "worker-7", *run_dir])
        assert shown.exit_code == 0
        assert shown.output.count("most recent call first") == text.count("most recent call first")
        refused = CliRunner().invoke(app, ["stacks", "worker", *run_dir]).exception
        assert isinstance(refused, BadInput) and "paceline status" in str(refused)
        os.kill(started.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, started.pid, os.WSTOPPED)
        text, note = read_stacks(started.pid, log)
        assert not text
        assert "stopped" in note and f"kill -CONT {started.pid}" in note
    text, note = read_stacks(started.pid, log)
    assert not text and "has ended" in note


def test_a_process_without_the_handler_is_not_ended_by_the_question(tmp_path: Path) -> None:
    code = "print('ready', flush=True); import time; time.sleep(600)"
    with process(tmp_path / "log", code) as started:
        text, note = read_stacks(started.pid, tmp_path / "log")
        assert not text and "starting" in note
        assert started.poll() is None


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
