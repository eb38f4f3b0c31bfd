"""TOML form of a resolved configuration."""

from __future__ import annotations

import tomli_w

from paceline.config.schema import Config


def to_toml(config: Config) -> str:
    """TOML that ``load_config`` reads back to an equal ``Config``.

    TOML has no null: a field without a value is left out if that is its default, and ``"none"``
    otherwise.
    """
    sections = {}
    for section, fields in config.model_dump(mode="json").items():
        known = type(getattr(config, section)).model_fields
        sections[section] = {
            name: "none" if value is None else value
            for name, value in fields.items()
            if value is not None or known[name].default is not None
        }
    return tomli_w.dumps(sections)
