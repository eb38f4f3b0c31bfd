"""A body of /v1/chat/completions, checked in full before anything is done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.dataset.rows import Message
from rollout_worker.openai_server.api_errors import ApiError, invalid, unsupported
from rollout_worker.openai_server.tools import calls_of, tools_of

_IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
}
"""Change nothing about what is sampled."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Accepted with these values, which are those of a request without them."""
_MOST_STOPS = 16


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Fields that the client left out are None."""

    model: str
    messages: list[Message]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: tuple[str, ...]
    logprobs: bool
    stream: bool
    stream_usage: bool
    tools: list[dict[str, Any]]
    calls: bool
    """What looks like calls of tools is told as such: there are tools and tool_choice is not none."""


def parse(body: Any) -> ChatRequest:
    """Raises Refusal, naming the field. Fields that are null are as good as left out."""
    if not isinstance(body, Mapping):
        raise ApiError(400, "the body must be a JSON object", "invalid_json")
    fields = {name: value for name, value in body.items() if value is not None}
    model = fields.pop("model", None)
    if not isinstance(model, str):
        raise invalid("model", "a model's name is needed; see /v1/models")
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "a list of messages is needed")
    older = _integer(fields.pop("max_tokens", None), "max_tokens", least=1)
    newer = _integer(fields.pop("max_completion_tokens", None), "max_completion_tokens", least=1)
    options = fields.pop("stream_options", {})
    if not isinstance(options, Mapping):
        raise invalid("stream_options", "an object is expected")
    tools = tools_of(fields.pop("tools", []))
    choice = fields.pop("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise unsupported(
            "tool_choice", f"tool_choice = {choice!r:.80} is not supported here, only auto or none"
        )
    request = ChatRequest(
        model=model,
        messages=_answers_named(
            [message_of(m, f"messages[{at}]") for at, m in enumerate(messages)]
        ),
        max_tokens=older if newer is None else newer,
        temperature=_number(fields.pop("temperature", None), "temperature", 0, 2),
        top_p=_number(fields.pop("top_p", None), "top_p", 0, 1),
        seed=_integer(fields.pop("seed", None), "seed", least=-(1 << 63)),
        stop=_stops(fields.pop("stop", [])),
        logprobs=_boolean(fields.pop("logprobs", False), "logprobs"),
        stream=_boolean(fields.pop("stream", False), "stream"),
        stream_usage=bool(options.get("include_usage")),
        tools=tools,
        calls=bool(tools) and choice == "auto",
    )
    if request.top_p == 0:
        raise invalid("top_p", "must be above 0")
    if request.messages[-1]["role"] == "assistant":
        raise invalid("messages", "the last one must not be the assistant's: it is its turn now")
    for name, value in fields.items():
        if name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            raise unsupported(name, f"{name} is not supported here")
        if value not in _NEUTRAL[name]:
            allowed = " or ".join(repr(v) for v in _NEUTRAL[name])
            raise unsupported(name, f"{name} = {value!r:.80} is not supported here, only {allowed}")
    return request


def message_of(message: Any, where: str) -> Message:
    """role, content as one text, and name, tool_call_id or tool_calls where there are any."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise invalid(where, "an object with a role is expected")
    for name in ("function_call", "audio"):
        if message.get(name):
            raise unsupported(where, f"{where}.{name} is not supported here")
    result: Message = {"role": message["role"], "content": _text(message.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            result[name] = message[name]
    if calls := calls_of(message, where):
        result["tool_calls"] = calls
    return result


def _answers_named(messages: list[Message]) -> list[Message]:
    """Answers of tools with the tool's name, which clients leave out and some templates need."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return messages


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise invalid(f"{where}.content", "text, or a list of parts, is expected")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise unsupported(where, f"{where}.content: only parts of text are supported")
        texts.append(part["text"])
    return "".join(texts)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise invalid("stop", "a text or a list of texts, none of them empty, is expected")
    if len(stops) > _MOST_STOPS:
        raise invalid("stop", f"at most {_MOST_STOPS} texts")
    return tuple(stops)


def _number(value: Any, name: str, low: float, high: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise invalid(name, "a number is expected")
    if not low <= value <= high:
        raise invalid(name, f"{value} is not within {low} and {high}")
    return float(value)


def _integer(value: Any, name: str, *, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 63:
        raise invalid(name, f"a whole number from {least} on is expected")
    return value


def _boolean(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise invalid(name, "true or false is expected")
    return value
