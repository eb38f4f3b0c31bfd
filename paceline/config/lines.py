"""Line numbers of the fields in a TOML file, for error messages: tomllib keeps no positions."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping


def field_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line (from 1) of every key and table header of a valid TOML document, by path.

    tomllib parses the document up to each line in turn. It fails inside a statement, so what is new
    when it succeeds began on the line after the last success.
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
