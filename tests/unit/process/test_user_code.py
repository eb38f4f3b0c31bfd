"""Modules of the start directory are found, and never in place of an installed one."""

import os
import sys
from pathlib import Path

import pytest

from paceline.user_code import (
    SAFE_PATH,
    NotFound,
    find,
    safe_path_for_children,
    search_start_directory_last,
)
from testbed.fleets.local_run import ROOT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.parametrize("first", ["", "the directory"])
def test_the_start_directory_goes_from_the_front_to_the_end(here: Path, first: str) -> None:
    sys.path.insert(0, str(here) if first else "")
    before = sys.path[1:]
    search_start_directory_last()
    search_start_directory_last()
    assert sys.path == [*before, *([] if str(ROOT) in before else [str(ROOT)]), str(here)]


def test_the_file_without_the_name_is_told_if_an_installed_module_hides_it(here: Path) -> None:
    (here / "controller.py").write_text("def score(completion): return 1.0\n")
    with pytest.raises(NotFound, match=r"controller \(.*controller/__init__.py\) has no 'score'"):
        find("controller:score")


@pytest.mark.parametrize("does", ["sys.exit(0)", "raise GeneratorExit", "1 / 0"])
def test_an_import_that_would_end_the_process_is_a_name_that_is_not_found(
    here: Path, does: str
) -> None:
    (here / "leaves.py").write_text(f"import sys\n{does}\n")
    with pytest.raises(NotFound, match="cannot import leaves: "):
        find("leaves:score")


def test_children_of_a_library_get_the_safe_path_only_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SAFE_PATH, raising=False)
    with safe_path_for_children():
        assert os.environ[SAFE_PATH] == "1"
    assert SAFE_PATH not in os.environ


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("mine.scores:exactly_sort", "exactly_sorted"),
        ("mine.scores:Judge.scor", "score"),
        ("mine.score:exactly_sorted", "mine.scores"),
        ("minne:score", "mine"),
        ("mine.scores:nothing_like_it", ""),
    ],
)
def test_a_name_that_is_nearly_right_is_told_with_what_was_meant(
    here: Path, name: str, meant: str
) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "__init__.py").touch()
    text = "def exactly_sorted(): ...\nclass Judge:\n    def score(self): ...\n"
    (here / "mine" / "scores.py").write_text(text)
    for module in [module for module in sys.modules if module.startswith("mine")]:
        del sys.modules[module]
    with pytest.raises(NotFound) as told:
        find(name)
    assert (f"Did you mean {meant}?" in str(told.value)) == bool(meant)
    assert ("Did you mean" in str(told.value)) == bool(meant)
