"""Calls of tools: between a completion's text and OpenAI's ``tool_calls``.

    Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    └ content ┘ └ a call, in the form that Hermes and Qwen models write ────┘

What is no call in this form, to the letter, stays part of the content. The text itself is left as it was
sampled, and so are its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_worker.openai_server.api_errors import invalid, unsupported

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


def calls_in(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, blanks around it gone if there are any, and the calls."""
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


def tools_of(value: Any) -> list[dict[str, Any]]:
    """A request's ``tools``, checked. Raises Refusal."""
    if not isinstance(value, list):
        raise invalid("tools", "a list is expected")
    for at, tool in enumerate(value):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("type"), str):
            raise invalid("tools", f"[{at}]: an object with a type is expected")
        if tool["type"] != "function":
            raise unsupported("tools", f"tools[{at}]: only functions are supported here")
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid("tools", f"[{at}]: a function with a name is expected")
    return value


def calls_of(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """``tool_calls`` of a message as chat templates take them: arguments as an object, not as JSON.

    Raises Refusal.
    """
    calls = message.get("tool_calls") or []
    if calls and message["role"] != "assistant":
        raise invalid(where, "only the assistant calls tools")
    if not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls", "a list is expected")
    result = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid(f"{where}.tool_calls[{at}]", "a function with a name is expected")
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            arguments = _object(arguments)
        if not isinstance(arguments, dict):
            raise invalid(f"{where}.tool_calls[{at}]", "arguments: a JSON object is expected")
        result.append(
            {
                "id": str(call.get("id", "")),
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return result


def same_calls(made: Sequence[ToolCall], told: Sequence[Mapping[str, Any]]) -> bool:
    """Whether ``told``, as calls_of gives them, are these calls. Ids aside."""
    functions = [call["function"] for call in told]
    return [(c.name, c.arguments) for c in made] == [
        (function["name"], function["arguments"]) for function in functions
    ]


def _call_at(text: str, start: int) -> tuple[ToolCall | None, int]:
    """The call whose JSON begins at ``start``, blanks aside, and where it ends; or None and ``start``."""
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


def _object(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
