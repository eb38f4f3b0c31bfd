"""Configuration files: from TOML and overrides to a checked ``Config``, and back to TOML."""

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline.config.changes import default_of, values_of, with_settings
from paceline.config.fields import AS_TOML, AtStart, Change, Fixed, Live, Section, meaning
from paceline.config.schema import SECTIONS, SETTINGS, TABLES, Config
from paceline.config.sections.scorers import ScorerConfig
from paceline.errors import BadInput
from paceline.masking import MASK, masked_settings
from paceline.process.files import read_ours, start_owner

FLEET_SECTIONS = (
    *("run", "model", "data", "reward", "train", "objective", "evaluation", "rollout", "scorers"),
)
"""Sections with settings that must be equal in every process of a run."""

Field = tuple[str, ...]
"""Path of a section, a setting, or a setting in a table [SECTION.FIELD.NAME]."""


class ConfigError(BadInput):
    """A configuration cannot be used. One line a problem: the place, the field and the remedy."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads ``path`` (TOML) with overrides (``section.field=value``). Raises ConfigError."""
    path = Path(path)
    text = _read(path)
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_no_toml(path, text, str(error))) from None
    parsed = {override: _parse_override(override) for override in overrides}
    for override, (field, value) in parsed.items():
        _put(raw, field, value, override)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        places = {field: f"{path} line {line}" for field, line in field_lines(text).items()}
        for override, (field, _) in parsed.items():
            places[field] = f"--set {_shown(override)}"
            for depth in range(1, len(field)):
                places.setdefault(field[:depth], places[field])
        problems = "\n".join(_described(error, places, str(path)))
        # A run's own file: a release that knows all its settings has written it.
        strange = re.search(r"^.* line \d+: \S+ (?=is not a setting)", problems, re.MULTILINE)
        if strange and path.name == "config.toml" and (path.parent / "events.jsonl").is_file():
            problems = (
                f"{strange[0]}is a setting of another release, which wrote this run. Finish the "
                "run with that release, or begin a new one"
            )
        raise ConfigError(problems) from None


def _no_toml(path: Path, text: str, message: str) -> str:
    """One line: the place, the text there, the problem and the remedy."""
    found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    lines = text.splitlines() or [""]
    number = int(found[1]) if found and found[1] else len(lines)
    problem = message[: found.start()] if found else message
    remedy = (
        'A section is [NAME], a setting NAME = VALUE, and a text has quotes ("yes") on one line'
    )
    if problem.startswith("Cannot"):
        remedy = "It stands twice: remove one, and put the settings of a section together"
    there = lines[min(number, len(lines)) - 1].strip()
    name, equals, value = there.partition("=")
    if equals:
        there = f"{name.strip()} = {masked_settings(value.strip(), name.strip())}"
    return f"{path} line {number}: {there}: not valid TOML: {problem}. {remedy}"


def _shown(override: str) -> str:
    """``section.field=value``; a text is masked if the name is that of a secret."""
    name, _, text = override.partition("=")
    value = _parse_override(override)[1]
    if isinstance(value, str):
        return f"{name}={masked_settings(text, name)}"
    return f"{name}={text if _masked_input(value, name) == value else MASK}"


def _masked_input(value: Any, name: str) -> Any:
    """``value`` of a setting that does not take it: instead of the name of a file with a secret it
    may have the secret."""
    return masked_settings(value, name.removesuffix("_file"))


def to_toml(config: Config, *, mask: bool = False) -> str:
    """TOML that ``load_config`` reads back to an equal ``Config``, unless secrets are masked for a
    reader.

    TOML has no null: a field without a value is left out if that is its default, and ``"none"``
    otherwise.
    """
    written = config.model_dump(mode="json", context=AS_TOML)
    return tomli_w.dumps(masked_settings(written) if mask else written)


def fleet_digest(config: Config) -> tuple[str, str]:
    """Digest (hex) and canonical JSON of the settings that must agree across the fleet: not Live
    ones, which come from the controller, but the divisor of ``dr_grpo``, which a replica reads
    itself."""
    shared = _shared(config, Fixed, AtStart)
    if config.train.loss.aggregation == "dr_grpo":
        shared[f"rollout.{config.length_setting}"] = config.longest_completion
    return _digest(shared)


def run_digest(config: Config) -> tuple[str, str]:
    """Digest (hex) and canonical JSON of the settings that are fixed for the run."""
    return _digest(_shared(config, Fixed))


def changeable(config: Config) -> dict[str, Any]:
    """Settings of ``FLEET_SECTIONS`` that a run may change."""
    found = values_of(config, Live, AtStart)
    return {name: v for name, v in found.items() if name.partition(".")[0] in FLEET_SECTIONS}


def _shared(config: Config, *changes: type[Change]) -> dict[str, Any]:
    # Without defaults, so that a release with one more setting continues the run.
    return {
        name: value
        for name, value in values_of(config, *changes).items()
        if name.partition(".")[0] in FLEET_SECTIONS and value != default_of(name)
    }


def _digest(settings: Mapping[str, Any]) -> tuple[str, str]:
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32], canonical


def parse_setting(text: str, option: str = "--set ") -> tuple[str, Any]:
    """Dotted name and value of ``section.field=value``. Raises ConfigError with the remedy."""
    field, value = _parse_override(text, option)
    name = ".".join(field)
    if why := unknown_setting(name):
        raise ConfigError(f"{option}{_shown(text)}: {why}")
    return name, value


def unknown_setting(name: str) -> str:
    """Says that ``name`` is no setting, and which was probably meant; empty if it is one."""
    field = tuple(name.split("."))
    path, model = _owner(field)
    of_a_scorer = model is ScorerConfig and len(field) == 3 and field[2] in model.model_fields
    if name in SETTINGS or of_a_scorer or (path == ("objective",) and len(field) == 2):
        return ""
    return f"{name[:128] or 'an empty name'} {_no_setting(field)}"


def changed_config(config: Config, settings: Mapping[str, Any]) -> Config:
    """``config`` with ``settings``, by dotted name. Raises ConfigError that names the setting."""
    try:
        return with_settings(config, settings)
    except ValidationError as error:
        raise ConfigError("; ".join(_described(error, {}, ""))) from None


def _read(path: Path) -> str:
    try:
        # It names code that will run.
        content = read_ours(path, linked=True, trusted=start_owner())
        # Editors of Windows begin a file with a mark of its encoding.
        return content.decode("utf-8-sig")
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
            raise ConfigError(f"--set {_shown(override)}: {key} is a value, not a section")
        table = inner
    table[keys[-1]] = value


def _described(error: ValidationError, places: Mapping[Field, str], file: str) -> Iterable[str]:
    """A line for each field with an error: its place, the problem and the remedy."""
    found: dict[object, str] = {}
    depths: dict[object, int] = {}
    for number, detail in enumerate(error.errors()):
        field = _field_of(detail)
        about, message = _described_one(field, detail)
        prefixes = (about[:depth] for depth in range(len(about), 0, -1))
        place = next((places[prefix] for prefix in prefixes if prefix in places), file)
        key = (field, detail["type"] == "missing") if field else number
        # A union fails once for each of its alternatives: the one that fits best fails deepest.
        if len(detail["loc"]) > depths.get(key, -1):
            found[key] = f"{place}: {message}" if place else message
            depths[key] = len(detail["loc"])
    return dict.fromkeys(found.values())


def _field_of(error: ErrorDetails) -> Field:
    """Path of an error's setting, without the position inside the setting's value."""
    loc = tuple(str(part) for part in error["loc"])
    return loc[: len(_owner((*loc, ""))[0]) + 1]


def _described_one(field: Field, error: ErrorDetails) -> tuple[Field, str]:
    """The setting at whose place the error is shown, and the problem with the remedy."""
    name, message = ".".join(field), error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return field, f"{name} {_no_setting(field)}"
    if error["type"] == "missing":
        return field, f"{name} is missing. {_remedy_missing(field)}"
    if error["type"] == "value_error":
        dotted = [name.split(".") for name in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b", message)]
        named = [tuple(setting) for setting in dotted if setting[0] in Config.model_fields]
        in_table = ".".join(_owner((*field, ""))[0]) not in SECTIONS
        if named and not (field and in_table):
            return named[0], message
        return field, f"{name}: {message}"
    message = message[0].lower() + message[1:]
    if error["type"] in ("model_type", "model_attributes_type"):
        message = f"it is a section. Write [{name}] on a line of its own, and its settings under it"
    value = _masked_input(error["input"], name)
    shown, text = json.dumps(value, default=str), _meaning(field)
    return field, f"{name} = {shown}: {message}." + (f" {name}: {text}" if text else "")


def _no_setting(field: Field) -> str:
    """Says that ``field`` is no setting, and which was probably meant."""
    path, model = _owner(field)
    section, leaf = ".".join(path), field[-1]
    if section in SECTIONS:
        inside = [name for name in SETTINGS if name.startswith(f"{section}.")]
        inside += [name for name in SECTIONS if name.startswith(f"{section}.")]
    else:
        inside = [f"{section}.{name}" for name in model.model_fields] if path else []
    siblings = {name.rpartition(".")[2]: name for name in inside}
    meant = [siblings[name] for name in difflib.get_close_matches(leaf, siblings, 1)]
    meant += [name for name in SETTINGS if name.rpartition(".")[2] == leaf]
    if not path and not meant:
        meant = [f"[{name}]" for name in difflib.get_close_matches(field[0], SECTIONS, 1)]
    if meant:
        return f"is not a setting. Did you mean {meant[0]}?"
    there = f"Settings of [{section}]: {', '.join(siblings)}"
    return f"is not a setting. {there if path else 'The sections are ' + ', '.join(SECTIONS)}"


def _remedy_missing(field: Field) -> str:
    if len(field) == 1:
        fields = SECTIONS[field[0]].model_fields
        needed = [f"{name} = ..." for name, info in fields.items() if info.is_required()]
        return f"Add a section [{field[0]}] with {', '.join(needed)}"
    return f"Add {field[-1]} = ... under [{'.'.join(field[:-1])}]. {_meaning(field)}"


def _meaning(field: Field) -> str:
    info = _owner(field)[1].model_fields.get(field[-1])
    return meaning(info) if info and len(field) > 1 else ""


def _owner(field: Field) -> tuple[Field, type[Section]]:
    """Path and schema of the section, or of the table [SECTION.FIELD.NAME], that has ``field``."""
    for length in range(min(len(field) - 1, 3), 0, -1):
        path = field[:length]
        table = SECTIONS.get(".".join(path)) or TABLES.get(".".join(path[:-1]))
        if table is not None:
            return path, table
    return (), Config


def field_lines(text: str) -> dict[Field, int]:
    """Line (from 1) of every key of a valid TOML document, by path: tomllib keeps no positions.

    It parses the document up to each line in turn, and fails inside a statement: what is new when
    it succeeds began after the last success.
    """
    lines = text.split("\n")
    found: dict[Field, int] = {}
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


def _paths(table: Mapping[str, Any], path: Field = ()) -> Iterator[Field]:
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, Mapping):
            yield from _paths(value, (*path, key))
