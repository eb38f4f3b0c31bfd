"""Model directory that a server loads: an export, or the newest one of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import BadInput
from paceline.run_view.files.checkpoint_links import META

EXPORT_NOTE = "paceline.json"
"""File that every export has."""


def find_model(source: Path) -> Path:
    """``source`` if a model is in it, else the newest export directly below ``source``, a run
    directory.

    Raises BadInput for anything else; for a checkpoint it names the command that exports it.
    """
    if not source.is_dir():
        raise BadInput(f"{source}: no such directory. Give an export, or the directory of a run")
    if (source / META).is_file():
        raise BadInput(f"{source} is a checkpoint. {_export_first(source)}")
    if not (source / "config.json").is_file():
        source = _newest_export(source)
    _check(source)
    return source


def served_name(model: Path) -> str:
    """Name by which clients ask for the model: that of its run if the run directory is around it,
    else its own."""
    model = model.absolute()
    of_run = (model.parent / "config.toml").is_file()
    return model.parent.name if of_run else model.name


def context_length(model: Path) -> int | None:
    """Most tokens that the model's positions reach; None if its config.json does not say."""
    config = _config(model)
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if isinstance(found := part.get("max_position_embeddings"), int):
            return found
    return None


def _newest_export(run_dir: Path) -> Path:
    notes = sorted(run_dir.glob(f"*/{EXPORT_NOTE}"), key=lambda note: note.stat().st_mtime)
    if notes:
        return notes[-1].parent
    if (run_dir / "checkpoints").is_dir():
        raise BadInput(f"{run_dir}: the run has no export yet. {_export_first(run_dir)}")
    raise BadInput(
        f"{run_dir} is no export (it has no config.json) and no run directory (it has no checkpoints). Give one of "
        "them; `paceline runs` lists runs"
    )


def _export_first(source: Path) -> str:
    out = Path("exported")
    return f"Export it first: paceline export {source} --out {out}, and then paceline serve {out}"


def _check(model: Path) -> None:
    kinds = [str(kind) for kind in _config(model).get("architectures") or ()]
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise BadInput(
            f"{model} is a {kinds[0]}: it scores text and writes none. Export the policy instead"
        )
    if not any(model.glob("*.safetensors")) and not any(model.glob("*.bin")):
        raise BadInput(f"{model} has no weights (*.safetensors). Export the run again")


def _config(model: Path) -> dict[str, Any]:
    path = model / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}. Export the run again") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path} is not the configuration of a model. Export the run again")
    return found
