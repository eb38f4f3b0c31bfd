"""Generated files that are checked in are those that would be generated now."""

import subprocess
import sys
from pathlib import Path

import pytest

from testbed.settings_page import reference

ROOT = Path(__file__).resolve().parents[3]
MESSAGES = sorted((ROOT / "paceline" / "v1").glob("*_pb2*.py*"))


def test_settings_reference_is_current() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == reference(), "run `make docs`"


def test_tables_of_measurements_say_what_was_measured() -> None:
    check_passes("docs_tables")


def test_each_guard_that_the_mutation_check_removes_is_there() -> None:
    check_passes("mutation")


def check_passes(module: str) -> None:
    """``--check`` of a benchmark, as a process: tests import no benchmarks."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"run `python -m benchmarks.{module}`: {done.stdout}{done.stderr}"


def test_grpc_messages_are_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    protos = sorted((ROOT / "proto" / "paceline" / "v1").glob("*.proto"))
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"),
            *map(str, protos),
        ],
        check=True,
    )
    made = {path.name: path.read_text() for path in (tmp_path / "paceline" / "v1").iterdir()}
    kept = {path.name: path.read_text() for path in MESSAGES}
    assert kept == made, "run `make proto`"
