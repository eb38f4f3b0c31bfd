"""Which runs go on with more steps, and with which checkpoint a new one begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.observe.checkpoint_links import VOID
from paceline.observe.runs import can_extend
from paceline_launcher.cli.up import check_begins_elsewhere, from_override


def config(steps: int = 100, begin_with: str | None = None) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "/m", "initial_checkpoint": begin_with},
            "data": {"path": "rows.jsonl"},
            "train": {"steps": steps},
        }
    )


def checkpoint(run_dir: Path, step: int) -> Path:
    path = run_dir / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "meta.json").write_text(json.dumps({"step": step}))
    return path


def test_a_run_directory_stands_for_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path, 9)
    newest = checkpoint(tmp_path, 12)
    (tmp_path / "checkpoints" / "step-000015").mkdir()  # not complete
    wanted = [f"model.initial_checkpoint={json.dumps(str(newest))}"]
    assert from_override(tmp_path) == from_override(newest) == wanted
    assert from_override(None) == []


def test_the_best_checkpoint_stands_for_its_directory_and_not_for_the_link(tmp_path: Path) -> None:
    """The link moves on to a better one while the new run goes on."""
    best = checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 12)
    link = tmp_path / "checkpoints" / "best"
    link.symlink_to(best.name)
    assert from_override(link) == [f"model.initial_checkpoint={json.dumps(str(best))}"]


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="RUN_DIR/checkpoints/step-NNNNNN"):
        from_override(tmp_path)


def test_a_run_does_not_begin_with_its_own_checkpoint(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 12)
    with pytest.raises(BadInput, match=r"another run\.name"):
        check_begins_elsewhere(config(begin_with=str(path)), tmp_path)


@pytest.mark.parametrize(
    ("summary", "extends"),
    [
        ({"status": "finished", "reason": "", "steps": 100}, True),
        ({"status": "finished", "reason": "", "steps": 200}, False),
        ({"status": "finished", "reason": "paceline stop", "steps": 50}, False),
        ({"status": "interrupted", "reason": "interrupted", "steps": 50}, False),
        (None, False),
    ],
)
def test_only_a_run_that_reached_its_last_step_is_extended(
    summary: dict[str, object] | None, extends: bool
) -> None:
    assert can_extend(summary, lambda: 150) is extends


def test_a_voided_checkpoint_begins_no_run(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a", 2)
    (path / VOID).touch()
    with pytest.raises(BadInput, match="void"):
        check_begins_elsewhere(config(begin_with=str(path)), tmp_path / "b")
