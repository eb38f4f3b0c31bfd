"""Beginning of a new run with the weights of an earlier one (``paceline up --from``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import BadInput
from paceline.observe.checkpoint_links import VOID, complete

if TYPE_CHECKING:
    from paceline.config.schema import Config


def from_override(given: Path | None) -> list[str]:
    """Override that makes a run begin with a checkpoint, or with the newest of a directory."""
    if given is None:
        return []
    return [f"model.initial_checkpoint={json.dumps(str(_checkpoint_of(given)))}"]


def _checkpoint_of(given: Path) -> Path:
    if (given / "meta.json").is_file():
        return given.resolve()
    folder = given / "checkpoints" if (given / "checkpoints").is_dir() else given
    found = complete(folder)
    if not found:
        raise BadInput(
            f"--from: {given} is no checkpoint, and no run directory with one. Checkpoints are in "
            "RUN_DIR/checkpoints/step-NNNNNN, and the best one is RUN_DIR/checkpoints/best"
        )
    return found[-1].resolve()


def check_begins_elsewhere(settings: Config, directory: Path) -> str:
    """Sentence for users about a run that begins with a checkpoint; empty for any other. Raises
    BadInput if the checkpoint cannot be read, or is the run's own."""
    if settings.model.initial_checkpoint is None:
        return ""
    path = Path(settings.model.initial_checkpoint)
    try:
        meta = json.loads((path / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise BadInput(
            f"model.initial_checkpoint: {path} is not a complete checkpoint: {error}"
        ) from error
    if (path / VOID).exists():
        raise BadInput(
            f"--from: {path} is void: the weights of the other replicas of its run differed. Give "
            "another checkpoint"
        )
    if directory in path.resolve().parents:
        raise BadInput(
            f"--from: {path} is a checkpoint of the run in {directory} itself. Give the new run "
            "another directory with --run-dir, and another run.name"
        )
    return (
        f"begins with the weights of {path} (step {meta.get('step')}), and with its optimizer "
        "state if that fits. Steps, data order, learning-rate schedule and versions begin anew; "
        "the KL reference stays model.path"
    )
