"""Settings of a test as the schema nests them."""

from collections.abc import Mapping
from typing import Any

from paceline.config.schema import SECTIONS

TABLE_OF = {
    setting: section.removeprefix("train.")
    for section, model in SECTIONS.items()
    if section.startswith("train.")
    for setting in model.model_fields
}


def nested(train: Mapping[str, Any]) -> dict[str, Any]:
    """``train``, settings of [train], with those of its tables put into these: {"lr": 1e-3} becomes
    {"optimizer": {"lr": 1e-3}}."""
    found: dict[str, Any] = {}
    for name, value in train.items():
        if (table := TABLE_OF.get(name)) is not None:
            found.setdefault(table, {})[name] = value
        elif isinstance(value, Mapping):
            found.setdefault(name, {}).update(value)
        else:
            found[name] = value
    return found


def nested_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    """``sections`` with a nested [train]."""
    return {**sections, "train": nested(sections.get("train") or {})}
