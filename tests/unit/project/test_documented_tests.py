"""The page of guarantees names tests as evidence: they are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
TESTS = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


def rows(title: str) -> list[str]:
    section = PAGE.partition(f"## {title}\n")[2].partition("\n#")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def named(row: str) -> list[tuple[str, str]]:
    """(file, test) of each, written `file::test` or `file`: `test`, `test`."""
    found = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
    for path, names in re.findall(r"`(tests/[\w/]+\.py)`: ([^;|]*)", row):
        found += [(path, name) for name in re.findall(r"test_\w+", names)]
    return found


@pytest.mark.parametrize(("title", "least"), [("What others got wrong", 10), ("Attacks", 21)])
def test_each_row_names_tests_that_exist(title: str, least: int) -> None:
    assert len(rows(title)) >= least
    for row in rows(title):
        assert len(named(row)) >= max(1, row.count("`test_"), row.count("::")), row
        for path, name in named(row):
            assert f"def {name}(" in TESTS[ROOT / path], f"{path} has no {name}"


def test_each_file_and_test_that_the_kill_matrix_names_exists() -> None:
    matrix = "\n".join(rows("The kill matrix"))
    everything = "\n".join(TESTS.values())
    for path in set(re.findall(r"`(tests/[\w/]+\.py)`", matrix)):
        assert (ROOT / path).exists(), path
    for start in set(re.findall(r"`([a-z]+(?:_[a-z]+)+)…?(?:\[\w*-?\w*\])?`", matrix)):
        if not start.startswith("test_"):
            assert f"def test_{start}" in everything, f"no test_{start}..."
