"""Which runs go on with more steps, and with which checkpoint a new one begins."""

import json
from pathlib import Path

import pytest

from paceline.errors import BadInput
from paceline.observe.checkpoints import VOID
from paceline.observe.event_history import Status
from paceline.observe.projection import Projection
from paceline.observe.runs import can_extend
from paceline_launcher.cli.up import check_begins_elsewhere, from_override
from tests.fixtures.configs import config_of


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
    # The link moves on to a better one while the new run goes on.
    (best := tmp_path / "checkpoints" / "best").symlink_to(newest.name)
    assert from_override(best) == wanted


def test_what_begins_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="RUN_DIR/checkpoints/step-NNNNNN"):
        from_override(tmp_path)
    path = checkpoint(tmp_path / "a", 2)
    config = config_of(model={"initial_checkpoint": str(path)})
    with pytest.raises(BadInput, match=r"another run\.name"):
        check_begins_elsewhere(config, tmp_path / "a")
    (path / VOID).touch()
    with pytest.raises(BadInput, match="void"):
        check_begins_elsewhere(config, tmp_path / "b")


@pytest.mark.parametrize(
    ("status", "reason", "step", "extends"),
    [
        ("finished", "completed", 100, True),
        ("finished", "completed", 200, False),
        ("finished", "paceline stop", 50, False),
        ("interrupted", "interrupted", 50, False),
        ("", "", 0, False),
    ],
)
def test_only_a_run_that_reached_its_last_step_is_extended(
    status: Status, reason: str, step: int, extends: bool
) -> None:
    run = Projection()
    run.status, run.reason, run.step = status, reason, step
    assert can_extend(run, lambda: 150) is extends


def test_a_run_that_goes_on_with_more_steps_is_not_finished_any_more() -> None:
    run = Projection()
    head = {"position": "1-0", "t": 0.0, "reason": "", "steps": 40}
    for n, (kind, status) in enumerate((("RunFinished", "finished"), ("RunExtended", ""))):
        run.add_line({**head, "n": n, "type": kind})
        assert run.status == status
