"""Options of ``paceline eval``, and the configuration that they make."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from paceline.config.load import changed_config, parse_setting
from paceline.config.schema import Config
from paceline.config.sections.training import TrainConfig
from paceline.errors import BadInput
from paceline_launcher.cli.common import SetOption

if TYPE_CHECKING:
    from paceline.config.schema import Config

RECORDED_FIELDS = tuple(
    f"{name}_field" for name in ("messages", "completion", "chosen", "rejected", "margin", "label")
)
SET = "data"  # name of the set in the configuration
EngineName = StrEnum("EngineName", ["transformers", "vllm"])


def _option(text: str, *flag: str, **more: Any) -> Any:
    return typer.Option(*flag, help=text, **more)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options. None: as in the run that the model comes from, or the default of the setting."""

    data: Annotated[
        str | None,
        _option("Data set, as data.path; default: data.eval_path of the run.", metavar="FILE"),
    ] = None
    k: Annotated[int, _option("Samples of each prompt.", "--k", min=1, max=1024)] = 1
    greedy: Annotated[
        bool, _option("Take the most likely token; the default for one sample.", "--greedy")
    ] = False
    temperature: Annotated[
        float | None, _option("Sampling temperature; default: the run's, or 1.", min=1e-6)
    ] = None
    top_p: Annotated[
        float | None, _option("Nucleus sampling; default: the run's, or 1.", min=1e-6, max=1)
    ] = None
    max_tokens: Annotated[
        int | None, _option("Longest completion; default: the run's, or 1024.", min=1)
    ] = None
    reward: Annotated[
        list[str] | None,
        _option("Reward, may be repeated; default: the run's, or exact_match.", metavar="NAME"),
    ] = None
    engine: Annotated[EngineName | None, _option("Default: the run's, or transformers.")] = None
    limit: Annotated[int | None, _option("First prompts only, so many.", min=1)] = None
    seed: Annotated[int, _option("Seed of the samples.", min=0)] = 0
    threads: Annotated[int | None, _option("CPU threads of the engine; default: all.", min=1)] = (
        None
    )
    trust_remote_code: Annotated[
        bool, _option("Run code that comes with the model.", "--trust-remote-code")
    ] = False
    overrides: SetOption = None

    def __post_init__(self) -> None:
        if self.greedy and self.k > 1:
            raise BadInput(
                f"--greedy with --k {self.k}: all samples of a prompt would be equal. Leave one of "
                "them out"
            )
        for name in ("temperature", "top_p"):
            if self.greedy and getattr(self, name) is not None:
                option = name.replace("_", "-")
                raise BadInput(f"--{option} has no effect with --greedy. Leave one of them out")


def settings(wanted: Wanted, base: Config | None, model: str) -> Config:
    """Raises BadInput that names the option."""
    data = wanted.data or (base.data.eval_path if base is not None else None)
    if data is None:
        raise BadInput("--data is missing: give the file or data set to evaluate on")
    config = base or Config.model_validate({"model": {"path": model}, "data": {"path": data}})
    changes = dict(parse_setting(text) for text in wanted.overrides or ())
    if changes:
        config = changed_config(config, changes)
    threads = wanted.threads or len(os.sched_getaffinity(0))
    sections: dict[str, dict[str, Any]] = {
        # An export has the tokenizer of its checkpoint.
        "model": {
            "path": model,
            "tokenizer": config.model.tokenizer if base is None else None,
            "trust_remote_code": wanted.trust_remote_code or config.model.trust_remote_code,
        },
        "reward": _given(functions=wanted.reward),
        "rollout": {
            **_given(engine=wanted.engine, max_tokens=wanted.max_tokens),
            "on_update": "keep",  # no update comes, and only vLLM knows the others
            "source": "engine",
            "group_size": 2,
        },
        "fleet": {"rollout_threads": threads},
        "run": {"seed": wanted.seed},
    }
    raw = config.model_dump(mode="json")
    for section, values in sections.items():
        raw[section] |= values
    raw["evaluation"] = {"sets": {SET: _set(wanted, data, config)}}
    raw["data"]["eval_path"] = None
    # Nothing is trained, and what the run trained may have needed recorded rows.
    raw["train"] = TrainConfig().model_dump(mode="json")
    raw["objective"] = {}
    for name in RECORDED_FIELDS:
        raw["data"][name] = None
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        why = first["msg"].removeprefix("Value error, ")
        raise BadInput(f"{name}: {why}" if name else why) from None


def _set(wanted: Wanted, data: str, config: Config) -> dict[str, Any]:
    sampled = wanted.k > 1 or wanted.temperature is not None or wanted.top_p is not None
    known = data == config.data.eval_path
    return {
        "path": data,
        "name": config.data.name if known else None,
        "split": config.data.eval_split,
        "samples": wanted.k,
        "greedy": not sampled,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "limit": wanted.limit or (1 << 31),
    }


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


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
        refuse_scalar_head(path)
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
    refuse_scalar_head(out)
    return str(out)


def refuse_scalar_head(model: Path) -> None:
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
        return load_config(run_dir / "config.toml")
    except ConfigError:
        return None
