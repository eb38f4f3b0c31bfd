"""Prompt templates: text with ``{field}`` placeholders for the fields of a row."""

import json
from collections.abc import Mapping
from functools import lru_cache
from string import Formatter
from typing import Any


@lru_cache(maxsize=16)
def placeholders(template: str) -> tuple[str, ...]:
    """Names of the fields that ``template`` takes, each once. ``{{`` and ``}}`` stand for braces.

    Raises ValueError if it is no template, or takes no field.
    """
    names: dict[str, None] = {}
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}: write {{{{ and }}}} for braces of the text") from None
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if spec or conversion or not name.isidentifier():
            raise ValueError(
                f"{{{name}}} is no placeholder: write the name of a field between the braces, or "
                "{{ and }} for braces of the text"
            )
        names[name] = None
    if not names:
        raise ValueError(
            "it takes no field of the row, so all prompts would be equal: add {prompt}, for example"
        )
    return tuple(names)


def render(template: str, row: Mapping[str, Any]) -> str:
    """``template`` with the fields of ``row``: text as it is, other values as JSON.

    Raises KeyError if the row lacks a field.
    """
    return template.format_map({name: _text(row[name]) for name in placeholders(template)})


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
