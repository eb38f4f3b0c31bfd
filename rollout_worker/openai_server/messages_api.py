"""Anthropic's Messages, translated into a chat completion and back.

    tool_use    ──► a call in the assistant's message        text, calls ──► blocks
    tool_result ──► a message of role tool                   finish      ──► stop_reason

What a chat completion cannot say (images, thinking, documents, ...) is refused by name.
"""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from paceline.dataset.messages import Message
from rollout_worker.environments.base import Turn
from rollout_worker.openai_server.replies import (
    INVALID,
    UNSUPPORTED,
    ApiError,
    ChatReply,
    chat_call,
    sse,
)
from rollout_worker.openai_server.requests import (
    ChatRequest,
    Count,
    Stop,
    Translated,
    only,
    text_of,
)

_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def _as_chat(message: Any) -> list[Message]:
    """Chat messages: each result of a tool is one of its own, before the text beside it."""
    match message:
        case {"role": ("user" | "assistant" | "system") as role, "content": str() | list()}:
            content = message["content"]
        case _:
            raise PydanticCustomError(INVALID, "a role and its content are expected")
    results: list[Message] = []
    calls, texts = [], []
    for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        match role, block:
            case _, {"type": "text", "text": str(text)}:
                texts.append(text)
            case "user", {"type": "tool_result", "tool_use_id": str(call)}:
                answer = text_of(block.get("content") or "")
                results.append({"role": "tool", "tool_call_id": call, "content": answer})
            case "assistant", {"type": "tool_use", "id": str(), "name": str(), "input": dict()}:
                calls.append(chat_call(block["id"], block["name"], block["input"]))
            case _:
                kind = block.get("type") if isinstance(block, dict) else block
                raise PydanticCustomError(
                    UNSUPPORTED,
                    "a block that is not supported of {role}: {kind}",
                    {"role": role, "kind": str(kind)[:80]},
                )
    if texts or not results:
        results.append({"role": role, "content": "".join(texts), "tool_calls": calls or None})
    return results


def _function(tool: Any) -> dict[str, Any]:
    match tool:
        case {"name": str(), "input_schema": dict()} if tool.get("type", "custom") == "custom":
            function = {"name": tool["name"], "parameters": tool["input_schema"]}
            if tool.get("description"):
                function["description"] = tool["description"]
            return {"type": "function", "function": function}
    raise PydanticCustomError(UNSUPPORTED, "only tools of the client's own, with an input_schema")


class MessagesRequest(Translated):
    max_tokens: Count
    stop_sequences: list[Stop] = Field([])
    messages: Annotated[
        list[Annotated[list[Message], BeforeValidator(_as_chat)]], Field(min_length=1)
    ]
    system: Annotated[str, BeforeValidator(text_of)] = ""
    tools: list[Annotated[dict[str, Any], BeforeValidator(_function)]] = Field([])
    tool_choice: dict[str, Any] = Field({"type": "auto"})
    thinking: Annotated[Any, only({"type": "disabled"})] = None
    output_config: Annotated[Any, only({})] = None

    def chat(self) -> ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._chat(
            messages=[*system, *(message for several in self.messages for message in several)],
            tools=self.tools,
            tool_choice=self.tool_choice.get("type"),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
        )


class MessagesReply(ChatReply):
    def whole(self, turn: Turn) -> dict[str, Any]:
        text, calls = self.parts(turn)
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        for call in calls:
            named = {"id": call.id, "name": call.name, "input": call.arguments}
            blocks.append({"type": "tool_use", **named})
        stop = turn.stop if turn.stop in self.asked.stop and not calls else None
        reason = "tool_use" if calls else "stop_sequence" if stop else "end_turn"
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
            "stop_reason": reason if turn.finish == "stop" else "max_tokens",
            "stop_sequence": stop,
            "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.tokens)},
        }

    def first_event(self) -> bytes:
        # The message begins with the number of input tokens, which the turn tells.
        return _event("ping")

    def events(self, turn: Turn) -> Iterator[bytes]:
        whole = self.whole(turn)
        ends = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_start", message={**whole, **dict.fromkeys(ends), "content": []})
        inputs = iter(self.parts(turn)[1])
        for index, block in enumerate(whole["content"]):
            if block["type"] == "text":
                begun = {**block, "text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            else:
                begun = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": next(inputs).json}
            yield _event("content_block_start", index=index, content_block=begun)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=ends, usage=whole["usage"])
        yield _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return sse(error_body(error), "error")


def error_body(error: ApiError) -> dict[str, Any]:
    """In Anthropic's format, with this server's code and the field at fault beside it."""
    about = {"message": str(error), "code": error.code, "param": error.param}
    kind = _ERRORS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, **about}}


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
