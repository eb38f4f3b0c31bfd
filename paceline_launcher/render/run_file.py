"""Run file of a rendered job: settings that differ from the defaults, without secrets."""

import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

from paceline.config.fields import Section
from paceline.config.load import to_toml
from paceline.config.schema import Config
from paceline.config.sections.scorers import ScorerConfig, ScorersConfig
from paceline.errors import BadInput

END_OF_FILE = "END_OF_RUN_TOML"


def run_file(
    config: Config, changes: Mapping[str, Mapping[str, Any]], *, with_token_file: bool = False
) -> str:
    """TOML of ``config`` with ``changes`` (section, field, value), without defaults and secrets."""
    changed = with_changes(with_changes(config, changes), {"redis": {"url": None}})
    if not with_token_file:
        changed = with_changes(changed, {"auth": {"token_file": None}})
    sections = _not_default(tomllib.loads(to_toml(changed)), changed)
    return tomli_w.dumps(sections, multiline_strings=True)


def _not_default(values: Mapping[str, Any], section: Section) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in values.items():
        info, now = type(section).model_fields.get(name), getattr(section, name, None)
        if isinstance(now, ScorersConfig):
            value = {scorer: _scorer(table) for scorer, table in value.items()}
        elif isinstance(now, Section):
            value = _not_default(value, now)
        if isinstance(now, Section):
            changed |= {name: value} if value else {}
        elif info is None or now != info.get_default(call_default_factory=True):
            changed[name] = value
    return changed


def script_run_file(
    config: Config, changes: dict[str, dict[str, Any]], *, with_token_file: bool = False
) -> str:
    """The run file in a shell script, which adds the address of a user's Redis. Raises BadInput."""
    if config.redis.url is not None:
        # The others are settings of a server that Paceline starts.
        changes = {**changes, "redis": type(config.redis)().model_dump()}
    text = run_file(config, changes, with_token_file=with_token_file)
    if END_OF_FILE in text.splitlines():
        raise BadInput(f"a setting contains the line {END_OF_FILE}, which ends the run file")
    return text


def _scorer(table: Mapping[str, Any]) -> dict[str, Any]:
    default = {name: info.default for name, info in ScorerConfig.model_fields.items()}
    given = ScorerConfig.model_validate(table)
    return {name: v for name, v in table.items() if getattr(given, name) != default[name]}


def with_changes(config: Config, changes: Mapping[str, Mapping[str, Any]]) -> Config:
    updated = {
        name: getattr(config, name).model_copy(update=dict(new)) for name, new in changes.items()
    }
    return config.model_copy(update=updated)
