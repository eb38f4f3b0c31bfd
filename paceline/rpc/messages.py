"""Protobuf messages as plain values: counts stay numbers, absent fields get defaults.

Incarnations become text, as in the REST interface: they are random in 64 bits, and many readers of
JSON have 53 for a number.
"""

from __future__ import annotations

from typing import Any

AS_TEXT = frozenset({"incarnation"})


def as_dict(message: Any) -> dict[str, Any]:
    """``message`` as a dictionary that JSON can hold; enums by their short lower-case name."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            result[field.name] = {key: value[key] for key in sorted(value)}
        elif field.is_repeated:
            result[field.name] = [_plain(field, item) for item in value]
        else:
            result[field.name] = _plain(field, value)
    return result


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return as_dict(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name.rpartition("_")[2].lower()
    return str(value) if field.name in AS_TEXT else value
