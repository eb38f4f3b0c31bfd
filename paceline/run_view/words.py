"""Text of event records, as the controller rendered it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_listed(event: Mapping[str, Any]) -> bool:
    """Whether the event is shown to people. Events that happen many times a step carry no text."""
    return "text" in event


def text_of(event: Mapping[str, Any]) -> str:
    """One line of prose; the event's type if the record carries no text."""
    return str(event.get("text") or event.get("type", "?"))
