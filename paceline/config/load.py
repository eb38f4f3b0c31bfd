"""Configuration files: TOML and dotted overrides become a checked ``Config``, and it becomes TOML."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from paceline.config.fields import Section, meaning, table_of
from paceline.config.lines import field_lines
from paceline.config.schema import SECTIONS, Config
from paceline.config.sections.scorers import ScorerConfig
from paceline.config.setting_rules import Rule, values_of, with_settings
from paceline.errors import BadInput

FLEET_SECTIONS = (
    *("run", "model", "data", "reward", "train", "objective", "evaluation", "rollout", "scorers"),
)
"""Sections with settings that must be equal in every process of a run; see setting_rules."""

NEWER = (
    *("rollout.source", "data.messages_field", "data.completion_field", "data.chosen_field"),
    *("data.rejected_field", "data.margin_field", "data.label_field"),
    *("train.advantage", "train.surrogate", "train.importance_level", "train.kl_in"),
    *("train.entropy_coef", "train.overlong_filter", "train.covariance", "train.covariance_share"),
    *("train.covariance_range", "train.covariance_kl_coef", "train.router_aux_loss_coef"),
    *("train.reference", "reward.overlong_buffer", "reward.overlong_penalty"),
    *("data.sources", "data.prompt_template", "data.prompt_suffix", "data.chat_template_args"),
    *("data.long_prompts", "data.curriculum", "data.curriculum_min"),
)
"""Settings that earlier releases did not have. At their defaults they are in no digest, so that a
run of such a release can be continued."""

FIELDS = [(section, name) for section, model in SECTIONS.items() for name in model.model_fields]

TABLES = {
    (section, name): table
    for section, model in SECTIONS.items()
    for name, info in model.model_fields.items()
    if (table := table_of(info)) is not None
}
"""Sections of the tables [section.field.NAME], by section and field."""

Field = tuple[str, ...]
"""A section, or a section and a field; section, field, NAME and setting for one of a table."""


class ConfigError(BadInput):
    """A configuration cannot be used.

    The message names the field, the place (file and line, or override) and the remedy. Several
    problems are reported at once, one per line.
    """


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads ``path`` (TOML), applies overrides (``section.field=value``) and validates everything.

    An override's value is parsed as TOML (``3``, ``true``, ``["a", "b"]``); if that fails it is
    plain text. Raises ConfigError.
    """
    path = Path(path)
    text = _read(path)
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    overridden: dict[Field, str] = {}
    for override in overrides:
        field, value = _parse_override(override)
        _put(raw, field, value, override)
        overridden[field] = override
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        places = _Places(path, field_lines(text), overridden)
        found = dict.fromkeys(_describe(e, places) for e in _one_per_field(error.errors()))
        raise ConfigError("\n".join(found)) from None


def to_toml(config: Config) -> str:
    """TOML that ``load_config`` reads back to an equal ``Config``.

    TOML has no null: a field without a value is left out if that is its default, and ``"none"``
    otherwise.
    """
    sections = {}
    for section, fields in config.model_dump(mode="json").items():
        known = type(getattr(config, section)).model_fields
        sections[section] = _written(fields, known)
        for name, tables in fields.items():
            if (table := TABLES.get((section, name))) is not None:
                written = {
                    key: _written(inner, table.model_fields) for key, inner in tables.items()
                }
                sections[section][name] = written
    sections["scorers"] = {
        name: scorer.model_dump(mode="json", exclude_none=True)
        for name, scorer in config.scorers.by_name.items()
    }
    return tomli_w.dumps(sections)


def _written(values: Mapping[str, Any], known: Mapping[str, FieldInfo]) -> dict[str, Any]:
    return {
        name: "none" if value is None else value
        for name, value in values.items()
        if value is not None or (name in known and known[name].default is not None)
    }


def fleet_digest(config: Config) -> tuple[str, str]:
    """Digest (hex) and canonical JSON of the settings that must agree across the fleet.

    Settings that may change while the run runs are not among them: their values come from the
    controller. The divisor of the ``dr_grpo`` loss is: every replica reads it from its own file.
    """
    shared = _by_section(config, (Rule.FIXED, Rule.START))
    if config.train.aggregation == "dr_grpo":
        shared["rollout"][config.length_setting] = config.longest_completion
    return _digest(shared)


def run_digest(config: Config) -> tuple[str, str]:
    """Digest (hex) and canonical JSON of the settings that are fixed for the run."""
    return _digest(_by_section(config, (Rule.FIXED,)))


def changeable(config: Config) -> dict[str, Any]:
    """Settings of ``FLEET_SECTIONS`` that a run may change, while it runs or when it is continued."""
    found = values_of(config, (Rule.LIVE, Rule.START))
    return {name: v for name, v in found.items() if name.partition(".")[0] in FLEET_SECTIONS}


def _by_section(config: Config, rules: Sequence[Rule]) -> dict[str, dict[str, Any]]:
    """Settings of ``FLEET_SECTIONS`` under ``rules``."""
    nested: dict[str, dict[str, Any]] = {section: {} for section in FLEET_SECTIONS}
    for dotted, value in values_of(config, rules).items():
        section, _, name = dotted.partition(".")
        if dotted in NEWER and value == _default(section, name):
            continue
        if section in nested:
            nested[section][name] = value
    # As of the releases that did not know them: their runs can be continued.
    for section in ("objective", "scorers"):
        if not nested[section]:
            del nested[section]
    if not any(nested["evaluation"].values()):
        del nested["evaluation"]
    return nested


def _default(section: str, name: str) -> Any:
    known = SECTIONS[section].model_fields[name].get_default(call_default_factory=True)
    return json.loads(json.dumps(known))


def _digest(settings: Mapping[str, Any]) -> tuple[str, str]:
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32], canonical


def parse_setting(text: str, option: str = "--set ") -> tuple[str, Any]:
    """Dotted name and value of ``section.field=value``. Raises ConfigError with the remedy."""
    field, value = _parse_override(text, option)
    name = ".".join(field)
    if why := unknown_setting(name):
        raise ConfigError(f"{option}{text}: {why}")
    return name, value


def unknown_setting(name: str) -> str:
    """That ``name`` is no setting, with what was probably meant; empty if it is one."""
    field = tuple(name.split("."))
    if field in FIELDS or (field[0] == "objective" and len(field) == 2):
        return ""
    if field[0] == "scorers" and len(field) == 3 and field[2] in ScorerConfig.model_fields:
        return ""
    return f"{name[:128] or 'an empty name'} is not a setting. {_suggest(field)}"


def changed_config(config: Config, settings: Mapping[str, Any]) -> Config:
    """``config`` with ``settings``, by dotted name. Raises ConfigError that names the setting."""
    try:
        return with_settings(config, settings)
    except ValidationError as error:
        places = _Places(Path("settings"), {}, {})
        found = dict.fromkeys(_describe(e, places) for e in _one_per_field(error.errors()))
        raise ConfigError("; ".join(line.removeprefix("settings: ") for line in found)) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file. Give the path of the run's TOML configuration"
        ) from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a directory. Give the path of the run's TOML configuration"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _parse_override(override: str, option: str = "--set ") -> tuple[Field, Any]:
    dotted, equals, value = override.partition("=")
    keys = tuple(key.strip() for key in dotted.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"{option}{override}: write it as section.field=value")
    try:
        return keys, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value


def _put(raw: dict[str, Any], keys: Field, value: Any, override: str) -> None:
    table = raw
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {key} is a value, not a section")
        table = inner
    table[keys[-1]] = value


@dataclass(frozen=True, slots=True)
class _Places:
    """The origin of a field's value: an override, a line of the file, or just the file."""

    path: Path
    lines: Mapping[Field, int]
    overridden: Mapping[Field, str]

    def of(self, field: Field) -> str:
        for depth in range(len(field), 0, -1):
            if override := self.overridden.get(field[:depth]):
                return f"--set {override}"
            if line := self.lines.get(field[:depth]):
                return f"{self.path} line {line}"
        for dotted, override in self.overridden.items():
            if field and dotted[: len(field)] == field:
                return f"--set {override}"
        return str(self.path)


def _one_per_field(errors: list[ErrorDetails]) -> Iterator[ErrorDetails]:
    """The first error of each field: a union fails once for each of its alternatives."""
    seen = set()
    for error in errors:
        key = (_field_of(error), error["type"] == "missing")
        if key not in seen or not key[0]:
            seen.add(key)
            yield error


def _field_of(error: ErrorDetails) -> Field:
    """Section and field of an error, without the position inside the field's value. Of a scorer:
    with its name between."""
    loc = tuple(str(part) for part in error["loc"])
    if loc[:1] == ("scorers",):
        return loc[:3]
    return loc[:4] if loc[:2] in TABLES else loc[:2]


def _describe(error: ErrorDetails, places: _Places) -> str:
    """One line: the place, the problem and the remedy."""
    field = _field_of(error)
    name = ".".join(field)
    if error["type"] == "extra_forbidden":
        return f"{places.of(field)}: {name} is not a setting. {_suggest(field)}"
    if error["type"] == "missing":
        return f"{places.of(field)}: {name} is missing. {_remedy_missing(field)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        if field[:2] in TABLES or (field[:1] == ("scorers",) and len(field) > 1):
            return f"{places.of(field)}: {name}: {message}"
        mentioned = re.findall(r"\b[a-z]+\.[a-z_]+\b", message)
        place = places.of(tuple(mentioned[0].split(".")) if mentioned else field)
        return f"{place}: {message}"
    message = message[0].lower() + message[1:]
    shown = json.dumps(error["input"], default=str)
    explained = f" {name}: {_meaning(field)}" if _meaning(field) else ""
    return f"{places.of(field)}: {name} = {shown}: {message}.{explained}"


def _suggest(field: Field) -> str:
    section, leaf = field[0], field[-1]
    if section == "scorers" and len(field) == 3:
        close = difflib.get_close_matches(leaf, ScorerConfig.model_fields, 1, 0.5)
        known = f"Settings of [scorers.{field[1]}]: {', '.join(ScorerConfig.model_fields)}"
        return f"Did you mean scorers.{field[1]}.{close[0]}?" if close else known
    elsewhere = [known for known, name in FIELDS if name == leaf]
    if len(field) == 1 or section not in SECTIONS:
        if elsewhere:
            return f"Did you mean {elsewhere[0]}.{leaf}? Put it under [{elsewhere[0]}]"
        if close := difflib.get_close_matches(section, SECTIONS, 1, 0.6):
            return f"Did you mean [{close[0]}]?"
        return f"The sections are {', '.join(SECTIONS)}"
    siblings = list(_section_of(field).model_fields)
    section = ".".join(field[:-1] if len(field) > 3 and field[:2] in TABLES else field[:1])
    close = difflib.get_close_matches(leaf, siblings, 1, 0.7)
    if not close and elsewhere:
        return f"Did you mean {elsewhere[0]}.{leaf}?"
    if close := close or difflib.get_close_matches(leaf, siblings, 1, 0.5):
        return f"Did you mean {section}.{close[0]}?"
    return f"Settings of [{section}]: {', '.join(siblings)}"


def _remedy_missing(field: Field) -> str:
    if field[0] == "scorers" and len(field) > 2:
        return f"Add {field[2]} = ... under [{field[0]}.{field[1]}]. {_meaning(field)}"
    if len(field) == 1:
        fields = SECTIONS[field[0]].model_fields
        needed = [f"{name} = ..." for name, info in fields.items() if info.is_required()]
        return f"Add a section [{field[0]}] with {', '.join(needed)}"
    return (
        f"Add {field[-1]} = ... under [{'.'.join(field[:-1])}], or --set {'.'.join(field)}=.... "
        f"{_meaning(field)}"
    )


def _meaning(field: Field) -> str:
    if field[0] == "scorers" and len(field) == 3:
        info = ScorerConfig.model_fields.get(field[2])
        return meaning(info) if info else ""
    info = _section_of(field).model_fields.get(field[-1]) if len(field) > 1 else None
    return meaning(info) if info else ""


def _section_of(field: Field) -> type[Section]:
    """The section whose setting ``field`` is."""
    section = SECTIONS[field[0]]
    return TABLES.get((field[0], field[1]), section) if len(field) > 3 else section
