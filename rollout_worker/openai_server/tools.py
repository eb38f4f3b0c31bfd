"""Tool calls in a completion's text, and OpenAI's ``tool_calls``.

    Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    └ content ┘ └ a call, in the form that Hermes and Qwen models write ────┘

Anything that is not exactly in this form stays part of the content. The recorded text and its
tokens stay as they were sampled.
"""

import json
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


def calls_in(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls. If there are any, the text is stripped."""
    rest: list[str] = []
    calls: list[ToolCall] = []
    while (at := text.find(_OPEN)) >= 0:
        call, end = _call_at(text, at + len(_OPEN))
        if call is None:
            rest.append(text[:end])
        else:
            rest.append(text[:at])
            calls.append(call)
        text = text[end:]
    rest.append(text)
    whole = "".join(rest)
    return (whole.strip() if calls else whole), calls


def _call_at(text: str, start: int) -> tuple[ToolCall | None, int]:
    """The call whose JSON begins at ``start``, and the end of it; or None and ``start``."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start
    left = text[end:].lstrip()
    if not left.startswith(_CLOSE) or not isinstance(value, dict):
        return None, start
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None, start
    return ToolCall(name, arguments), len(text) - len(left) + len(_CLOSE)


def parse_arguments(text: str) -> Any:
    """The value of a JSON text; None if it is invalid or has half a surrogate pair."""
    try:
        value = _DECODER.decode(text)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError):
        return None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
