"""Chat messages: one form for data rows, environments and the OpenAI endpoint.

The content of a message is text. It may come as a list of text parts, or as null beside tool calls.
Fields that are null are left out, as chat templates expect of fields that a message does not have.
"""

from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]

TEXT_PARTS = ("text", "input_text", "output_text")


class BadMessage(ValueError):
    """Something that is no chat message, or has more than text in it."""


def normal_message(message: object) -> Message:
    """``message`` with text as its content. Raises BadMessage."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadMessage("a chat message needs role and content")
    fields = {name: value for name, value in message.items() if value is not None}
    role = message["role"]
    if "content" not in fields and role != "assistant":
        raise BadMessage(f"a chat message needs role and content; one of the {role} has no content")
    return {**fields, "role": role, "content": content_text(fields.get("content", ""))}


def content_text(content: object) -> str:
    """The text of a message's content. Raises BadMessage."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadMessage(f"the content of a message is text, not {type(content).__name__}")
    return "".join(map(_part_text, content))


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS or not isinstance(text, str):
        raise BadMessage(f"a part of kind {kind!r}: messages have text alone")
    return text
