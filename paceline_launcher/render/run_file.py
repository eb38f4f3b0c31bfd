"""Run file of a rendered job: the configuration's settings that differ from the defaults, without
secrets."""

from __future__ import annotations

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
    """TOML of ``config`` with ``changes`` (section, field, value), whose defaults are left out.

    The address of Redis is left out as well, and without ``with_token_file`` the token's file:
    processes get them from secrets.
    """
    changed = without_secrets(with_changes(config, changes))
    if with_token_file:
        changed = with_changes(changed, {"auth": {"token_file": config.auth.token_file}})
    sections = _not_default(tomllib.loads(to_toml(changed)), changed)
    return tomli_w.dumps(sections, multiline_strings=True)


def _not_default(values: Mapping[str, Any], section: Section) -> dict[str, Any]:
    """Settings of ``section`` that differ from the defaults, without empty sections."""
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
    """The same for a shell script, which adds the address of a Redis that the user runs. Raises
    BadInput if it has the line that ends it in the script."""
    if config.redis.url is not None:
        # The others are settings of a server that Paceline starts.
        changes = {**changes, "redis": type(config.redis)().model_dump()}
    text = run_file(config, changes, with_token_file=with_token_file)
    if END_OF_FILE in text.splitlines():
        raise BadInput(f"a setting contains the line {END_OF_FILE}, which ends the run file")
    return text


def _scorer(table: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of one scorer that differ from the defaults."""
    default = {name: info.default for name, info in ScorerConfig.model_fields.items()}
    given = ScorerConfig.model_validate(table)
    return {name: v for name, v in table.items() if getattr(given, name) != default[name]}


def with_changes(config: Config, changes: Mapping[str, Mapping[str, Any]]) -> Config:
    """``config`` with ``changes``, which are known to be valid."""
    updated = {
        name: getattr(config, name).model_copy(update=dict(new)) for name, new in changes.items()
    }
    return config.model_copy(update=updated)


def without_secrets(config: Config) -> Config:
    """``config`` without the address of Redis, which may have a password in it, and the token's
    file."""
    redis = config.redis.model_copy(update={"url": None})
    auth = config.auth.model_copy(update={"token_file": None})
    return config.model_copy(update={"redis": redis, "auth": auth})
