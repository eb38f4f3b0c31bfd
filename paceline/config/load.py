"""Configuration files: from TOML and overrides to a checked ``Config``, and back to TOML."""

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
from pydantic_core import ErrorDetails

from paceline.config.changes import values_of, with_settings
from paceline.config.fields import NEWER, AtStart, Change, Fixed, Live, Section, meaning
from paceline.config.schema import RENAMED, SECTIONS, SETTINGS, TABLES, Config, with_new_names
from paceline.config.sections.scorers import ScorerConfig
from paceline.errors import BadInput
from paceline.masking import masked_settings
from paceline.process.files import check_ours

FLEET_SECTIONS = (
    *("run", "model", "data", "reward", "train", "objective", "evaluation", "rollout", "scorers"),
)
"""Sections with settings that must be equal in every process of a run."""

Field = tuple[str, ...]
"""Path of a section, a setting, or a setting in a table [SECTION.FIELD.NAME]."""


class ConfigError(BadInput):
    """A configuration cannot be used. One line a problem: the place, the field and the remedy."""


def load_config(path: str | Path, overrides: Sequence[str] = (), *, stored: bool = False) -> Config:
    """Reads ``path`` (TOML) with overrides (``section.field=value``). Raises ConfigError.

    ``stored``: a run wrote the file, perhaps with the names of an earlier release.
    """
    path = Path(path)
    text = _read(path)
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_no_toml(path, text, str(error))) from None
    if stored:
        raw = with_new_names(raw)
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


_TOML_REMEDIES = {
    "Cannot overwrite": "This setting stands twice: remove one of the two lines",
    "Cannot declare": "This section stands twice: put its settings under the first one",
    "Cannot mutate": "This section stands twice: put its settings under the first one",
    "Invalid value": 'A text needs quotes ("yes"); true, false and numbers have none',
    "Illegal character": "A text ends on its line, with the quote that it began with",
    "Expected ']'": "A section is [NAME] on a line of its own",
    "Expected '='": 'A setting is NAME = VALUE; a text needs quotes ("yes")',
}


def _no_toml(path: Path, text: str, message: str) -> str:
    """One line: the place, the text there, the problem and the remedy."""
    found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    lines = text.splitlines() or [""]
    number = int(found[1]) if found and found[1] else len(lines)
    problem = message[: found.start()] if found else message
    remedy = next((r for words, r in _TOML_REMEDIES.items() if problem.startswith(words)), "")
    there = lines[min(number, len(lines)) - 1].strip()
    name, equals, value = there.partition("=")
    if equals:
        there = f"{name.strip()} = {masked_settings(value.strip(), name.strip())}"
    return f"{path} line {number}: {there}: not valid TOML: {problem}. {remedy}".strip()


def to_toml(config: Config, *, mask: bool = False) -> str:
    """TOML that ``load_config`` reads back to an equal ``Config``, unless secrets are masked for a
    reader.

    TOML has no null: a field without a value is left out if that is its default, and ``"none"``
    otherwise.
    """
    written = _written(config.model_dump(mode="json"), Config)
    written["scorers"] = {
        name: scorer.model_dump(mode="json", exclude_none=True)
        for name, scorer in config.scorers.by_name.items()
    }
    return tomli_w.dumps(masked_settings(written) if mask else written)


def _written(values: Mapping[str, Any], section: type[Section], path: str = "") -> dict[str, Any]:
    """``values`` of ``section``, or of a table, whose dotted name is ``path``."""
    written: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{path}.{name}" if path else name
        if dotted in SECTIONS:
            written[name] = _written(value, SECTIONS[dotted], dotted)
        elif (table := TABLES.get(dotted)) is not None:
            written[name] = {
                key: _written(inner, table, f"{dotted}.{key}") for key, inner in value.items()
            }
        elif value is not None:
            written[name] = value
        elif name in section.model_fields and section.model_fields[name].default is not None:
            written[name] = "none"
    return written


def fleet_digest(config: Config) -> tuple[str, str]:
    """Digest (hex) and canonical JSON of the settings that must agree across the fleet: not Live
    ones, which come from the controller, but the divisor of ``dr_grpo``, which a replica reads
    itself."""
    shared = _by_section(config, Fixed, AtStart)
    if config.train.loss.aggregation == "dr_grpo":
        shared["rollout"][config.length_setting] = config.longest_completion
    return _digest(shared)


def run_digest(config: Config) -> tuple[str, str]:
    """Digest (hex) and canonical JSON of the settings that are fixed for the run."""
    return _digest(_by_section(config, Fixed))


def changeable(config: Config) -> dict[str, Any]:
    """Settings of ``FLEET_SECTIONS`` that a run may change."""
    found = values_of(config, Live, AtStart)
    return {name: v for name, v in found.items() if name.partition(".")[0] in FLEET_SECTIONS}


def _by_section(config: Config, *changes: type[Change]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {section: {} for section in FLEET_SECTIONS}
    for dotted, value in values_of(config, *changes).items():
        section, _, name = dotted.partition(".")
        if section not in nested or _is_newer_default(dotted, value):
            continue
        # Digests of earlier releases know no tables in [train].
        nested[section][name.rpartition(".")[2] if section == "train" else name] = value
    # As of the releases that did not know them: their runs can be continued.
    for section in ("objective", "scorers"):
        if not nested[section]:
            del nested[section]
    if not any(nested["evaluation"].values()):
        del nested["evaluation"]
    return nested


def _is_newer_default(dotted: str, value: Any) -> bool:
    info = SETTINGS.get(dotted)
    if info is None or NEWER not in info.metadata:
        return False
    default = info.get_default(call_default_factory=True)
    return bool(value == json.loads(json.dumps(default)))


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
    """Says that ``name`` is no setting, and which was probably meant; empty if it is one."""
    field = tuple(name.split("."))
    _, model = _section_of(field)
    if name in SETTINGS or (field[0] == "objective" and len(field) == 2):
        return ""
    if model is ScorerConfig and len(field) == 3 and field[2] in model.model_fields:
        return ""
    return f"{name[:128] or 'an empty name'} {_no_setting(field)}"


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
        if path.is_file():
            # It names code that will run. Code of the directory where somebody starts Paceline runs
            # anyway: in a container, root often works in a directory of the host's user.
            check_ours(path, trusted=Path.cwd().stat().st_uid)
        # Editors of Windows begin a file with a mark of its encoding.
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path}: {reason}. Give the path of the run's TOML configuration"
        ) from None


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
    """Path of an error's setting, without the position inside the setting's value."""
    loc = tuple(str(part) for part in error["loc"])
    return loc[: len(_table_of(loc) or _section_of(loc)[0]) + 1]


def _describe(error: ErrorDetails, places: _Places) -> str:
    """One line: the place, the problem and the remedy."""
    field = _field_of(error)
    name = ".".join(field)
    if error["type"] == "extra_forbidden":
        return f"{places.of(field)}: {name} {_no_setting(field)}"
    if error["type"] == "missing":
        return f"{places.of(field)}: {name} is missing. {_remedy_missing(field)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        if _table_of(field) or name == "reward.functions":
            return f"{places.of(field)}: {name}: {message}"
        mentioned = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b", message)
        place = places.of(tuple(mentioned[0].split(".")) if mentioned else field)
        return f"{place}: {message}"
    message = message[0].lower() + message[1:]
    if error["type"] in ("model_type", "model_attributes_type"):
        message = f"it is a section. Write [{name}] on a line of its own, and its settings under it"
    shown = json.dumps(error["input"], default=str)
    explained = f" {name}: {_meaning(field)}" if _meaning(field) else ""
    return f"{places.of(field)}: {name} = {shown}: {message}.{explained}"


def _no_setting(field: Field) -> str:
    """Says that ``field`` is no setting, and which was probably meant."""
    if (now := RENAMED.get(".".join(field))) is not None:
        return f"is now {now}"
    return f"is not a setting. {_suggest(field)}"


def _suggest(field: Field) -> str:
    path, model = _section_of(field)
    section, leaf = ".".join(path), field[-1]
    elsewhere = [known for known in SETTINGS if known.rpartition(".")[2] == leaf]
    if len(field) == 1 or field[0] not in SECTIONS:
        if elsewhere:
            owner = elsewhere[0].rpartition(".")[0]
            return f"Did you mean {elsewhere[0]}? Put it under [{owner}]"
        if close := difflib.get_close_matches(field[0], SECTIONS, 1, 0.6):
            return f"Did you mean [{close[0]}]?"
        return f"The sections are {', '.join(SECTIONS)}"
    names = [f"{section}.{name}" for name in model.model_fields]
    inner = [name for name in SETTINGS if name.startswith(f"{section}.") and name not in names]
    siblings = {name.rpartition(".")[2]: name for name in [*inner, *names] if name not in SECTIONS}
    close = difflib.get_close_matches(leaf, siblings, 1, 0.7)
    if not close and elsewhere:
        return f"Did you mean {elsewhere[0]}?"
    if close := close or difflib.get_close_matches(leaf, siblings, 1, 0.5):
        return f"Did you mean {siblings[close[0]]}?"
    return f"Settings of [{section}]: {', '.join(siblings)}"


def _remedy_missing(field: Field) -> str:
    if len(field) == 1:
        fields = SECTIONS[field[0]].model_fields
        needed = [f"{name} = ..." for name, info in fields.items() if info.is_required()]
        return f"Add a section [{field[0]}] with {', '.join(needed)}"
    add = f"Add {field[-1]} = ... under [{'.'.join(field[:-1])}]"
    override = "" if field[0] == "scorers" else f", or --set {'.'.join(field)}=..."
    return f"{add}{override}. {_meaning(field)}"


def _meaning(field: Field) -> str:
    info = _section_of(field)[1].model_fields.get(field[-1])
    return meaning(info) if info and len(field) > 1 else ""


def _table_of(field: Field) -> Field:
    """Path of the table [SECTION.FIELD.NAME] that ``field`` is in; empty if it is in none."""
    for length in (1, 2):
        if ".".join(field[:length]) in TABLES and len(field) > length:
            return field[: length + 1]
    return ()


def _section_of(field: Field) -> tuple[Field, type[Section]]:
    """Path and schema of the section, or table, whose setting ``field`` is."""
    if (table := _table_of(field)) and len(field) > len(table):
        return table, TABLES[".".join(table[:-1])]
    for length in (2, 1):
        if ".".join(field[:length]) in SECTIONS and len(field) > length:
            return field[:length], SECTIONS[".".join(field[:length])]
    return (), Config


def field_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line (from 1) of every key of a valid TOML document, by path: tomllib keeps no positions.

    It parses the document up to each line in turn, and fails inside a statement: what is new when
    it succeeds began after the last success.
    """
    lines = text.split("\n")
    found: dict[tuple[str, ...], int] = {}
    began = 1
    for end in range(1, len(lines) + 1):
        try:
            parsed = tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue
        for path in _paths(parsed):
            found.setdefault(path, began)
        began = end + 1
    return found


def _paths(value: object) -> Iterator[tuple[str, ...]]:
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1]
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield (key,)
            for path in _paths(inner):
                yield (key, *path)
