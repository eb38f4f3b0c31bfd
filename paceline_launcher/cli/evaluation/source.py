"""Sources of ``paceline eval``: the model that is judged, and the settings of its run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import BadInput

if TYPE_CHECKING:
    from paceline.config.schema import Config

_EXPORT_NOTE = "paceline.json"


@dataclass(frozen=True, slots=True)
class Source:
    """``checkpoint``: to be exported first; None: ``model`` can be loaded as it is."""

    model: str
    checkpoint: Path | None
    config: Config | None
    """Configuration of the run that the model comes from, if it is known."""


def find_source(text: str) -> Source:
    """A model's directory or hub name, an export, a checkpoint, or a run directory with its newest
    checkpoint. Raises BadInput."""
    from paceline.dataset.rows import could_be_hub_name
    from paceline.observe.checkpoint_links import META, complete

    path = Path(text).expanduser()
    if not path.is_dir():
        if could_be_hub_name(text) and not path.exists():
            return Source(text, None, None)
        raise BadInput(f"{text}: no such directory. Give a model, an export, a checkpoint or a run")
    if (path / META).is_file():
        return Source(text, path, _run_config(path.absolute().parent.parent))
    if (path / "config.json").is_file():
        _refuse_scalar_head(path)
        return Source(str(path), None, _config_of_export(path))
    if (path / "checkpoints").is_dir():
        found = list(complete(path / "checkpoints"))
        if not found:
            raise BadInput(f"{text}: the run has no complete checkpoint yet")
        return Source(text, found[-1], _run_config(path))
    raise BadInput(
        f"{text} is no model (it has no config.json), no checkpoint (no {META}) and no run. Give "
        "one of them"
    )


def exported(source: Source, into: Path, *, trust_remote_code: bool) -> str:
    """Directory or hub name of the model that an engine loads. Raises ExportError."""
    if source.checkpoint is None:
        return source.model
    from policy_worker.checkpoint.export import export

    out = into / "model"
    original = source.config.model.path if source.config is not None else None
    if original is not None and original.startswith(("/", ".")) and not Path(original).is_dir():
        original = None
    export(source.checkpoint, original, out, trust_remote_code=trust_remote_code)
    _refuse_scalar_head(out)
    return str(out)


def _refuse_scalar_head(model: Path) -> None:
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{model / 'config.json'} cannot be read: {error}") from None
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise BadInput(
            f"{model} is {kinds[0]}: it scores text and writes none. Give a language model"
        )


def _config_of_export(path: Path) -> Config | None:
    try:
        note = json.loads((path / _EXPORT_NOTE).read_text())
        return _run_config(Path(note["checkpoint"]).parent.parent)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _run_config(run_dir: Path) -> Config | None:
    """Configuration of the run; None if its directory has gone, or if it is of another release."""
    from paceline.config.load import ConfigError, load_config

    try:
        return load_config(run_dir / "config.toml", stored=True)
    except ConfigError:
        return None
