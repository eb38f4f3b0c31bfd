"""A resolved configuration written as TOML."""

from __future__ import annotations

import json
from typing import Any

from paceline.config.schema import Config


def to_toml(config: Config) -> str:
    """TOML that ``load_config`` reads back to an equal ``Config``.

    A field without a value is left out where that is its default, else written as ``"none"``.
    """
    parts = []
    for section, fields in config.model_dump(mode="json").items():
        defaults = type(getattr(config, section)).model_fields
        lines = [f"[{section}]"]
        for name, value in fields.items():
            if value is not None:
                lines.append(f"{name} = {value_to_toml(value)}")
            elif defaults[name].default is not None:
                lines.append(f'{name} = "none"')
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def value_to_toml(value: Any) -> str:
    """A value as TOML: numbers, text, and lists and inline tables of them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # A JSON string is a TOML basic string, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(value_to_toml(v) for v in value)}]"
    if isinstance(value, dict):
        inner = ", ".join(f"{value_to_toml(str(k))} = {value_to_toml(v)}" for k, v in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise TypeError(f"no TOML for {type(value).__name__}")
