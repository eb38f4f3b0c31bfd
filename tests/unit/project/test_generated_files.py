"""What is generated and checked in is what would be generated now."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import mutation, render_docs_tables
from benchmarks.recovery import table
from benchmarks.recovery.matrix import CASES
from paceline.config.reference import reference

ROOT = Path(__file__).resolve().parents[3]
STUBS = sorted((ROOT / "paceline" / "v1").glob("*_pb2*.py*"))


def test_settings_reference_is_current() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == reference(), "run `make docs`"


@pytest.mark.parametrize("page", render_docs_tables.PAGES)
def test_tables_of_measurements_say_what_was_measured(page: str) -> None:
    written = (ROOT / "docs" / page).read_text()
    assert written == render_docs_tables.current(page), (
        "run `python -m benchmarks.render_docs_tables`"
    )


def test_the_table_of_recovery_says_what_was_measured() -> None:
    rows = json.loads((render_docs_tables.RESULTS / "recovery.json").read_text())
    assert table.PAGE.read_text() == table.page(rows, CASES), (
        "run `python -m benchmarks.recovery --table`"
    )
    assert rows.keys() == CASES.keys(), "every row of the table was measured"


@pytest.mark.parametrize("guard", mutation.GUARDS, ids=lambda guard: guard.name)
def test_each_guard_that_the_mutation_check_removes_is_there(guard: mutation.Guard) -> None:
    for patch in guard.patches:
        assert (ROOT / patch.file).read_text().count(patch.old) == 1, patch.file


def test_grpc_stubs_are_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    protos = sorted((ROOT / "proto" / "paceline" / "v1").glob("*.proto"))
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}"),
            *map(str, protos),
        ],
        check=True,
    )
    made = {path.name: path.read_text() for path in (tmp_path / "paceline" / "v1").iterdir()}
    kept = {path.name: path.read_text() for path in STUBS}
    assert kept == made, "run `make proto`"
