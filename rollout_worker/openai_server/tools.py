"""Tool calls in a completion's text, and OpenAI's ``tool_calls``.

    Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    └ content ┘ └ a call, in the form that Hermes and Qwen models write ────┘

Anything that is not exactly in this form stays part of the content. The recorded text and its
tokens stay as they were sampled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.dataset.rows import Message
from rollout_worker.openai_server.api_errors import ApiError

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


def same_calls(made: Sequence[ToolCall], sent: Sequence[Mapping[str, Any]]) -> bool:
    """True if the ``tool_calls`` of a client's message are these calls. Ids are ignored."""
    functions = [call["function"] for call in sent]
    return [(c.name, c.arguments) for c in made] == [(f["name"], f["arguments"]) for f in functions]


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


DIVERGED = "conversation_diverged"


def added(recorded: Sequence[Message] | None, sent: Sequence[Message]) -> list[Message]:
    """The new messages. Raises ApiError if ``sent`` does not extend ``recorded``. A sample is one
    sequence of tokens: it cannot contain a conversation that was rewritten, nor a second
    conversation."""
    if recorded is None:
        raise _diverged("part of this sample was not made of messages")
    for at, (old, new) in enumerate(zip(recorded, sent, strict=False)):
        if not _same(old, new):
            raise _diverged(
                f"messages[{at}] differs from the recorded message; a sample is one conversation "
                "that only grows"
            )
    if len(sent) <= len(recorded):
        raise _diverged(
            f"{len(sent)} messages after a conversation of {len(recorded)}; a turn cannot be "
            "sampled again"
        )
    return list(sent[len(recorded) :])


def repeats(recorded: Sequence[Message] | None, sent: Sequence[Message]) -> bool:
    """True if the newest turn answered the request ``sent``."""
    if not recorded or len(sent) != len(recorded) - 1:
        return False
    return all(_same(old, new) for old, new in zip(recorded, sent, strict=False))


def _same(old: Message, new: Message) -> bool:
    if old["role"] != new["role"] or old["role"] != "assistant":
        return dict(old) == dict(new)
    text, sent = str(old["content"]), str(new["content"]).strip()
    if "tool_calls" not in new or "tool_calls" in old:
        return text.strip() == sent and old.get("tool_calls") == new.get("tool_calls")
    rest, calls = calls_in(text)
    return rest.strip() == sent and same_calls(calls, new["tool_calls"])


def _diverged(why: str) -> ApiError:
    return ApiError(400, why, DIVERGED, "messages")
