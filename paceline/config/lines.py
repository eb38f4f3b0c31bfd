"""Line numbers of the fields in a TOML file, for error messages: tomllib keeps no positions."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any


def field_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line (from 1) of every key and table header of a valid TOML document, by path.

    The end of a statement is found by parsing growing runs of lines with tomllib itself, so strings
    and arrays over several lines need no grammar of our own.
    """
    lines = text.splitlines()
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    at = 0
    while at < len(lines):
        stripped = lines[at].strip()
        if not stripped or stripped.startswith("#"):
            at += 1
            continue
        parsed, used = _statement(lines, at)
        paths = list(_paths(parsed))
        if stripped.startswith("["):
            table = max(paths, key=len, default=())
            found.setdefault(table, at + 1)
        else:
            for path in paths:
                found.setdefault((*table, *path), at + 1)
        at += used
    return found


def _statement(lines: list[str], at: int) -> tuple[Mapping[str, Any], int]:
    for used in range(1, len(lines) - at + 1):
        try:
            return tomllib.loads("\n".join(lines[at : at + used])), used
        except tomllib.TOMLDecodeError:
            continue
    return {}, 1


def _paths(value: object) -> Iterator[tuple[str, ...]]:
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1]
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield (key,)
            for path in _paths(inner):
                yield (key, *path)
