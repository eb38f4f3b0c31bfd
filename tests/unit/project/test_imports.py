"""Imports between the developer's folders, which the contracts in pyproject.toml do not cover."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def imported(folder: str) -> Iterator[tuple[str, str]]:
    """(file, top-level package) of each import, also of those inside functions."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    modules = [name.name for name in names]
                case ast.ImportFrom(module=str(module), level=0):
                    modules = [module]
                case _:
                    continue
            for module in modules:
                yield path.relative_to(ROOT).as_posix(), module.partition(".")[0]


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("tests", {"benchmarks"}),
        ("testbed", {"tests", "benchmarks"}),
        ("benchmarks", {"tests"}),
        ("examples", {"tests", "testbed", "benchmarks"}),
    ],
)
def test_a_folder_imports_none_of_those_above_it(folder: str, others: set[str]) -> None:
    found = list(imported(folder))
    assert found
    assert [f"{path}: {package}" for path, package in found if package in others] == []
