"""From a TOML file and dotted overrides to a checked ``Config``, or one clear message."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from paceline.config.errors import ConfigError
from paceline.config.lines import field_lines
from paceline.config.schema import Config

__all__ = ["ConfigError", "fleet_digest", "load_config"]

FLEET_SECTIONS = ("run", "model", "data", "reward", "train", "rollout")
"""Sections that must be equal in every process of a run."""

PATHS = {
    "model": ("path", "tokenizer"),
    "data": ("path", "eval_path"),
    "train": ("reference_path",),
    "controller": ("payload_dir",),
    "auth": ("token_file", "tls_cert", "tls_key", "tls_ca"),
}
"""Settings in which a leading ``~`` is the home directory. Expanded here, once: of the libraries that
get them, some expand it and some take it for a name."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads ``path`` (TOML), applies overrides (``section.field=value``) and checks everything.

    An override's value is read as TOML (``3``, ``true``, ``["a", "b"]``) and, where that fails, as
    a plain string. TOML has no null: ``"none"`` unsets a field that may be unset. Raises
    ``ConfigError``.
    """
    path = Path(path)
    text = _read(path)
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    overridden: dict[tuple[str, ...], str] = {}
    for override in overrides:
        dotted, value = _parse_override(override)
        _put(raw, dotted, value, override)
        overridden[dotted] = override
    try:
        return Config.model_validate(_expanded(_unset(raw)))
    except ValidationError as error:
        places = _Places(path, field_lines(text), overridden)
        found = dict.fromkeys(_describe(e, places) for e in _without_echoes(error.errors()))
        raise ConfigError("\n".join(found)) from None


def fleet_digest(config: Config) -> tuple[str, str]:
    """Digest (hex) and canonical JSON of the sections that must agree across the fleet."""
    dumped = config.model_dump(mode="json", include=set(FLEET_SECTIONS))
    canonical = json.dumps(dumped, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32], canonical


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file. Give the path of the run's TOML configuration"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    dotted, equals, value = override.partition("=")
    keys = tuple(key.strip() for key in dotted.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: write it as section.field=value")
    try:
        return keys, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value


def _put(raw: dict[str, Any], keys: tuple[str, ...], value: Any, override: str) -> None:
    at = raw
    for key in keys[:-1]:
        inner = at.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {key} is a value, not a section")
        at = inner
    at[keys[-1]] = value


def _unset(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` with ``"none"`` turned into None where the schema allows None."""
    result: dict[str, Any] = {}
    for section, fields in raw.items():
        model = _section_of(section)
        if model is None or not isinstance(fields, Mapping):
            result[section] = fields
            continue
        optional = {n for n, f in model.model_fields.items() if NoneType in get_args(f.annotation)}
        result[section] = {
            n: None if v == "none" and n in optional else v for n, v in fields.items()
        }
    return result


def _expanded(raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with home directories in its paths written out."""
    result = dict(raw)
    for section, names in PATHS.items():
        fields = raw.get(section)
        if not isinstance(fields, Mapping):
            continue
        result[section] = {
            n: str(Path(v).expanduser()) if n in names and str(v).startswith("~") else v
            for n, v in fields.items()
        }
    return result


class _Places:
    """Says where a field was set: an override, a line of the file, or nowhere."""

    def __init__(
        self,
        path: Path,
        lines: Mapping[tuple[str, ...], int],
        overridden: Mapping[tuple[str, ...], str],
    ) -> None:
        self._path, self._lines, self._overridden = path, lines, overridden

    def of(self, field: tuple[str, ...]) -> str:
        for depth in range(len(field), 0, -1):
            if override := self._overridden.get(field[:depth]):
                return f"--set {override}"
            if line := self._lines.get(field[:depth]):
                return f"{self._path} line {line}"
        for dotted, override in self._overridden.items():
            if field and dotted[: len(field)] == field:
                return f"--set {override}"
        return str(self._path)


def _without_echoes(errors: list[ErrorDetails]) -> Iterator[ErrorDetails]:
    """A wrong value of a union field fails once per alternative; the first says enough."""
    seen = set()
    for error in errors:
        key = (_field_of(error["loc"]), error["type"] if error["type"] == "missing" else "")
        if key not in seen or not key[0]:
            seen.add(key)
            yield error


def _field_of(loc: Sequence[int | str]) -> tuple[str, ...]:
    """The part of a pydantic location that names sections and fields of the schema."""
    model: type[BaseModel] | None = Config
    field: list[str] = []
    for part in loc:
        if model is None or not isinstance(part, str):
            break
        field.append(part)
        info = model.model_fields.get(part)
        model = _section(info.annotation) if info else None
    return tuple(field)


def _section_of(name: str) -> type[BaseModel] | None:
    info = Config.model_fields.get(name)
    return _section(info.annotation) if info else None


def _section(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _describe(error: ErrorDetails, places: _Places) -> str:
    field = _field_of(error["loc"])
    name = ".".join(field)
    if error["type"] == "extra_forbidden":
        return f"{places.of(field)}: {name} is not a setting. {_suggest(field)}"
    if error["type"] == "missing":
        return f"{places.of(field)}: {name} is missing. {_remedy_missing(field)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        mentioned = re.findall(r"\b[a-z]+\.[a-z_]+\b", message)
        place = places.of(tuple(mentioned[0].split(".")) if mentioned else field)
        return f"{place}: {message}"
    message = message[0].lower() + message[1:]
    shown = json.dumps(error["input"], default=str)
    meaning = _meaning(field)
    return f"{places.of(field)}: {name} = {shown}: {message}." + (
        f" {name} is: {meaning}" if meaning else ""
    )


def _suggest(field: tuple[str, ...]) -> str:
    known = {f"{s}.{f}": f for s, f in _all_fields()}
    sections = list(Config.model_fields)
    if len(field) == 1:
        close = difflib.get_close_matches(field[0], sections, 1, 0.6)
        owners = [dotted for dotted, f in known.items() if f == field[0]]
        if owners:
            return f"Did you mean {owners[0]}? Put it under [{owners[0].split('.')[0]}]"
        if close:
            return f"Did you mean [{close[0]}]?"
        return f"The sections are {', '.join(sections)}"
    section, leaf = field[0], field[1]
    siblings = [f for s, f in _all_fields() if s == section]
    if near := difflib.get_close_matches(leaf, siblings, 1, 0.7):
        return f"Did you mean {section}.{near[0]}?"
    if elsewhere := [dotted for dotted, f in known.items() if f == leaf]:
        return f"Did you mean {elsewhere[0]}?"
    if near := difflib.get_close_matches(leaf, siblings, 1, 0.5):
        return f"Did you mean {section}.{near[0]}?"
    return f"Settings of [{section}]: {', '.join(siblings)}"


def _remedy_missing(field: tuple[str, ...]) -> str:
    if len(field) == 1:
        model = _section_of(field[0])
        needed = [
            f"{n} = ..."
            for n, f in (model.model_fields if model else {}).items()
            if f.is_required()
        ]
        return f"Add a section [{field[0]}] with {', '.join(needed)}"
    return f"Add {field[-1]} = ... under [{field[0]}], or --set {'.'.join(field)}=.... " + (
        f"It is: {_meaning(field)}" if _meaning(field) else ""
    )


def _meaning(field: tuple[str, ...]) -> str:
    model = _section_of(field[0]) if len(field) > 1 else None
    info = model.model_fields.get(field[1]) if model else None
    return " ".join((info.description or "").split()) if info else ""


def _all_fields() -> Iterator[tuple[str, str]]:
    for section in Config.model_fields:
        model = _section_of(section)
        for name in model.model_fields if model else ():
            yield section, name
