"""Replies of /v1/chat/completions, whole or as server-sent events, and errors in OpenAI's format,
so that clients raise the exceptions their users know."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from pydantic import ValidationError

from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.environments.base import Turn

if TYPE_CHECKING:
    from rollout_worker.openai_server.requests import ChatRequest

UNSUPPORTED = "unsupported_parameter"
INVALID = "invalid_value"


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits[:80]} is beyond a float")
    return number


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


class ApiError(Exception):
    """``code``: for programs, for example context_length_exceeded. ``param``: the request's field
    at fault."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        about = {"type": "invalid_request_error", "param": self.param, "code": self.code}
        return {"error": {"message": str(self), **about}}

    @classmethod
    def from_validation(cls, invalid: ValidationError) -> "ApiError":
        """The first problem that pydantic found in a request's body."""
        problem = invalid.errors(include_url=False, include_context=False)[0]
        place, message = problem["loc"], problem["msg"]
        if problem["type"] == "json_invalid" or not place:
            return cls(
                400, f"the body is not a JSON object of a request: {message}", "invalid_json"
            )
        param = str(place[0])
        if param in ("messages", "input") and len(place) > 1:
            param = f"{param}[{place[1]}]"
        if problem["type"] == "extra_forbidden":
            return cls(400, f"{param} is not supported here", UNSUPPORTED, param)
        code = UNSUPPORTED if problem["type"] in (UNSUPPORTED, "literal_error") else INVALID
        return cls(400, f"{'.'.join(map(str, place))}: {message}", code, param)


class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def json(self) -> str:
        """The arguments."""
        return json.dumps(self.arguments, ensure_ascii=False)


def chat_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in the form of a chat message."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatReply:
    """``call_ids``: prefix of the ids of tool calls; empty: calls stay part of the text. Other
    APIs' replies derive from it."""

    model: str
    tokenizer: PromptTokenizer
    asked: "ChatRequest"
    call_ids: str = ""
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, turn: Turn) -> dict[str, Any]:
        message, finish = self._message(turn)
        message = {"role": "assistant", "refusal": None, **message}
        choice = {"message": message, "logprobs": self._logprobs(turn), "finish_reason": finish}
        return self._body("chat.completion", turn, choice) | {"usage": _usage(turn)}

    def first_event(self) -> bytes:
        """Sent before the turn has been sampled."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def events(self, turn: Turn) -> Iterator[bytes]:
        message, finish = self._message(turn)
        for index, call in enumerate(message.get("tool_calls", ())):
            call["index"] = index
        yield self._chunk(message, turn, logprobs=self._logprobs(turn))
        yield self._chunk({}, turn, finish_reason=finish)
        if self.asked.stream_options.include_usage:
            yield sse(self._body("chat.completion.chunk", turn) | {"usage": _usage(turn)})
        yield b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """The event of a stream that ends without a turn."""
        return sse(error.body())

    def parts(self, turn: Turn) -> tuple[str, list[ToolCall]]:
        """The turn's text without its calls, and the calls."""
        rest, calls = calls_in(turn.text) if self.call_ids else (turn.text, [])
        # A reply that is sent again has the same ids.
        ids = f"{self.call_ids}_{turn.number}"
        return rest, [ToolCall(f"{ids}_{i}", *call) for i, call in enumerate(calls)]

    def logprobs(self, turn: Turn) -> list[dict[str, Any]]:
        """One entry a token; empty if the client asked for none."""
        if not self.asked.logprobs:
            return []
        texts = [self.tokenizer.decode_all([token]) for token in turn.tokens]
        return [
            {"token": text, "logprob": p, "bytes": list(text.encode()), "top_logprobs": []}
            for text, p in zip(texts, turn.logprobs, strict=True)
        ]

    def _message(self, turn: Turn) -> tuple[dict[str, Any], str]:
        """content and, if there are any, tool_calls; and the finish_reason."""
        rest, calls = self.parts(turn)
        if not calls:
            return {"content": rest}, turn.finish
        tool_calls = [chat_call(call.id, call.name, call.json) for call in calls]
        finish = "tool_calls" if turn.finish == "stop" else turn.finish
        return {"content": rest or None, "tool_calls": tool_calls}, finish

    def _chunk(self, delta: dict[str, Any], turn: Turn | None = None, **more: Any) -> bytes:
        choice = {"delta": delta, "logprobs": None, "finish_reason": None, **more}
        return sse(self._body("chat.completion.chunk", turn, choice))

    def _body(
        self, kind: str, turn: Turn | None, choice: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        about = {"object": kind, "created": self.created, "model": self.model}
        body: dict[str, Any] = {"id": f"chatcmpl-{self.id}", **about}
        if turn is not None:
            # The weights that answered.
            body["system_fingerprint"] = f"version-{turn.versions[-1][0]}"
        return {**body, "choices": [] if choice is None else [{"index": 0, **choice}]}

    def _logprobs(self, turn: Turn) -> dict[str, Any] | None:
        return {"content": self.logprobs(turn), "refusal": None} if self.asked.logprobs else None


def sse(data: dict[str, Any], event: str = "") -> bytes:
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


def _usage(turn: Turn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": len(turn.tokens),
        "total_tokens": turn.prompt_tokens + len(turn.tokens),
    }


def calls_in(text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """The text without its calls, and the calls: name and arguments. If there are any, the text is
    stripped. A call has the form that Hermes and Qwen models write:

        Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>

    Anything that is not exactly in this form stays part of the text.
    """
    rest: list[str] = []
    calls: list[Any] = []
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


def _call_at(text: str, start: int) -> tuple[tuple[str, dict[str, Any]] | None, int]:
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
    return (name, arguments), len(text) - len(left) + len(_CLOSE)


def parse_arguments(arguments: Any) -> Any:
    """The value of a JSON text, or the value itself; None if it is invalid, or has half a surrogate
    pair or a number that is not finite."""
    try:
        text = isinstance(arguments, str)
        value = _DECODER.decode(arguments or "{}") if text else arguments
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return value
    except (ValueError, RecursionError):
        return None
