"""The page of guarantees names tests as evidence: they are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
TESTS = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


def rows(title: str) -> list[str]:
    section = PAGE.partition(f"## {title}\n")[2].partition("\n#")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def test_each_test_that_is_named_for_a_hazard_exists() -> None:
    assert len(rows("What others got wrong")) == 10
    for row in rows("What others got wrong"):
        named = [part for part in row.split(";") if "`test_" in part]
        assert named, f"no test is named: {row}"
        for part in named:
            (path,) = re.findall(r"`(tests/[\w/]+\.py)`", part)
            for name in re.findall(r"`(test_\w+)`", part):
                assert f"def {name}(" in TESTS[ROOT / path], f"{path} has no {name}"


def test_each_file_and_test_that_the_kill_matrix_names_exists() -> None:
    matrix = "\n".join(rows("The kill matrix"))
    everything = "\n".join(TESTS.values())
    for path in set(re.findall(r"`(tests/[\w/]+\.py)`", matrix)):
        assert (ROOT / path).exists(), path
    for start in set(re.findall(r"`([a-z]+(?:_[a-z]+)+)…?(?:\[\w*-?\w*\])?`", matrix)):
        if not start.startswith("test_"):
            assert f"def test_{start}" in everything, f"no test_{start}..."


def test_each_attack_names_tests_that_exist() -> None:
    assert len(rows("Attacks")) > 20
    for row in rows("Attacks"):
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named, f"no test is named: {row}"
        for path, name in named:
            assert f"def {name}(" in TESTS[ROOT / path], f"{path} has no {name}"
