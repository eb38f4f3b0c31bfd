"""Starts that could never work: each is refused before anything is started."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.config.schema import Config
from paceline_launcher.preflight import machine
from paceline_launcher.preflight.checks import Place, run_checks
from paceline_launcher.preflight.findings import Start
from testbed.tiny_model import make_tiny_model

CHECKED = ("run directory", "disk")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("limits")
    make_tiny_model(root / "model", hidden=32)
    rows = [{"prompt": "s" + "1" * length, "answer": "1"} for length in (30, 20, 40)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def problems(files: Path, run_dir: Path, **sections: dict[str, Any]) -> list[str]:
    given: dict[str, dict[str, Any]] = {
        "run": {"name": "r"},
        "model": {"path": str(files / "model")},
        "data": {"path": str(files / "rows.jsonl")},
        "rollout": {"max_tokens": 8},
    }
    for name, fields in sections.items():
        given.setdefault(name, {}).update(fields)
    start = Start(Config.model_validate(given), run_dir, here=True)
    found = run_checks(start, Place.ANYWHERE | Place.CONTROL | Place.WORKERS)
    return [str(check) for check in found if check.name in CHECKED and check.state == "fail"]


def test_a_run_that_fits_has_no_problem_and_leaves_nothing_behind(
    files: Path, tmp_path: Path
) -> None:
    assert problems(files, tmp_path / "new" / "run") == []
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_run_directory_that_cannot_be_made_is_refused_with_its_path(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run_dir = tmp_path / "a" / "run"

    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(machine, "check_room", refuse)
    (problem,) = problems(files, run_dir)
    assert str(run_dir) in problem and os.strerror(number) in problem
    assert not (tmp_path / "a").exists()


def test_a_name_that_no_file_system_takes_is_refused(files: Path, tmp_path: Path) -> None:
    (problem,) = problems(files, tmp_path / ("x" * 300))
    assert "--run-dir" in problem


def test_a_disk_without_room_for_a_journal_is_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "DISK_FAIL", 1 << 60)
    (problem,) = problems(files, tmp_path)
    assert "free at" in problem and "--run-dir" in problem
