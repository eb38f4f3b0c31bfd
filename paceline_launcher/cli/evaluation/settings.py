"""Settings of ``paceline eval`` as a run's configuration with one evaluation set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from paceline.config.load import changed_config, parse_setting
from paceline.config.schema import Config
from paceline.config.sections.evaluation import EvalSetConfig
from paceline.config.sections.training import TrainConfig
from paceline.errors import BadInput

RECORDED_FIELDS = tuple(
    f"{name}_field" for name in ("messages", "completion", "chosen", "rejected", "margin", "label")
)
SET = "data"
"""Name of the set in the configuration."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options. None: as in the run that the model comes from, or the default of the setting."""

    data: str | None
    k: int
    greedy: bool
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    reward: Sequence[str]
    engine: str | None
    limit: int | None
    split: str | None
    prompt_field: str | None
    answer_field: str | None
    solved_at: float
    vote: str
    seed: int
    threads: int | None
    trust_remote_code: bool
    overrides: Sequence[str]


def settings(wanted: Wanted, base: Config | None, model: str) -> Config:
    """Raises BadInput that names the option."""
    _check(wanted)
    data = wanted.data or (base.data.eval_path if base is not None else None)
    if data is None:
        raise BadInput("--data is missing: give the file or data set to evaluate on")
    config = base or Config.model_validate({"model": {"path": model}, "data": {"path": data}})
    changes = dict(parse_setting(text) for text in wanted.overrides)
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
        "data": _given(prompt_field=wanted.prompt_field, answer_field=wanted.answer_field),
        "reward": _given(functions=list(wanted.reward) or None),
        "rollout": {
            **_given(engine=wanted.engine, max_tokens=wanted.max_tokens),
            "on_update": "keep",  # no update comes, and only vLLM knows the others
            "source": "engine",
            "group_size": 2,
        },
        "objective": {},
        "fleet": {"rollout_threads": threads},
        "run": {"seed": wanted.seed},
    }
    raw = config.model_dump(mode="json")
    for section, values in sections.items():
        raw[section] |= values
    raw["evaluation"] = {"sets": {SET: _set(wanted, data, config)}}
    raw["data"]["eval_path"] = None
    if wanted.prompt_field is not None:
        raw["data"]["prompt_template"] = None
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


def _check(wanted: Wanted) -> None:
    if wanted.greedy and wanted.k > 1:
        raise BadInput(
            f"--greedy with --k {wanted.k}: all samples of a prompt would be equal. Leave one of them out"
        )
    for name in ("temperature", "top_p"):
        if wanted.greedy and getattr(wanted, name) is not None:
            option = name.replace("_", "-")
            raise BadInput(f"--{option} has no effect with --greedy. Leave one of them out")


def _set(wanted: Wanted, data: str, config: Config) -> dict[str, Any]:
    sampled = wanted.k > 1 or wanted.temperature is not None or wanted.top_p is not None
    known = data == config.data.eval_path
    split = wanted.split or (
        config.data.eval_split if known else EvalSetConfig.model_fields["split"].default
    )
    return {
        "path": data,
        "name": config.data.name if known else None,
        "split": split,
        "samples": wanted.k,
        "greedy": not sampled,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "solved_at": wanted.solved_at,
        "vote": wanted.vote,
        **_given(limit=wanted.limit or (1 << 31)),
    }


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
