"""The documentation names tests as evidence: they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
TESTS = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n#")[0]


HAZARDS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in section("What others got wrong").splitlines()
    if line.startswith("| ") and not line.startswith("| hazard")
]


def test_all_ten_hazards_are_in_the_table() -> None:
    assert len(HAZARDS) == 10


@pytest.mark.parametrize(("hazard", "evidence"), HAZARDS, ids=lambda text: text[:30])
def test_each_test_that_is_named_for_a_hazard_exists(hazard: str, evidence: str) -> None:
    named = [part for part in evidence.split(";") if "`test_" in part]
    assert named, f"{hazard}: no test is named"
    for part in named:
        (path,) = re.findall(r"`(tests/[\w/]+\.py)`", part)
        for name in re.findall(r"`(test_\w+)`", part):
            assert re.search(rf"def {name}\(", TESTS[ROOT / path]), f"{path} has no {name}"


def test_each_file_and_test_that_the_kill_matrix_names_exists() -> None:
    matrix = section("The kill matrix")
    everything = "\n".join(TESTS.values())
    for path in set(re.findall(r"`(tests/[\w/]+\.py)`", matrix)):
        assert (ROOT / path).exists(), path
    for start in set(re.findall(r"`([a-z]+(?:_[a-z]+)+)…?(?:\[\w*-?\w*\])?`", matrix)):
        if not start.startswith("test_"):
            assert f"def test_{start}" in everything, f"no test_{start}..."


def test_each_attack_of_the_security_page_names_tests_that_exist() -> None:
    rows = [line for line in section("Attacks").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named, f"no test is named: {row}"
        for path, name in named:
            assert f"def {name}(" in TESTS[ROOT / path], f"{path} has no {name}"
