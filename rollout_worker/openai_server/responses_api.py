"""OpenAI's Responses, translated into a chat completion and back.

    instructions, items ──► messages; a call joins the assistant's message before it
    text, calls         ──► output items, which the client sends again with its next request

Nothing is stored here: previous_response_id and conversation are refused, like all that a chat
completion cannot say.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from paceline.dataset.messages import Message
from rollout_worker.environments.base import Turn
from rollout_worker.openai_server.replies import UNSUPPORTED, ApiError, ChatReply, chat_call, sse
from rollout_worker.openai_server.requests import ChatRequest, Count, Translated, only, text_of

_LOGPROBS = "message.output_text.logprobs"


def _items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _as_chat(item: Any) -> Message:
    match item:
        case {"type": "function_call", "call_id": str(), "name": str(), "arguments": str()}:
            call = chat_call(item["call_id"], item["name"], item["arguments"])
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
            return {"role": "tool", "tool_call_id": call_id, "content": text_of(output)}
        case {"role": str(role), "content": content} if item.get("type", "message") == "message":
            return {"role": role, "content": text_of(content)}
    kind = item.get("type") if isinstance(item, dict) else item
    about = {"kind": str(kind)[:80]}
    raise PydanticCustomError(UNSUPPORTED, "an item that is not supported: {kind}", about)


def _function(tool: Any) -> dict[str, Any]:
    match tool:
        case {"type": "function", "name": str()}:
            given = {name: value for name, value in tool.items() if value is not None}
            return {"type": given.pop("type"), "function": given}
    raise PydanticCustomError(UNSUPPORTED, "only functions are supported")


class ResponsesRequest(Translated):
    input: Annotated[
        list[Annotated[Message, BeforeValidator(_as_chat)]],
        Field(min_length=1),
        BeforeValidator(_items),
    ]
    instructions: str = ""
    max_output_tokens: Count | None = None
    tools: list[Annotated[dict[str, Any], BeforeValidator(_function)]] = Field([])
    tool_choice: Any = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        []
    )

    background: Annotated[Any, only(False)] = None
    reasoning: Annotated[Any, only({}, {"effort": "none"})] = None
    text: Annotated[Any, only({}, {"format": {"type": "text"}})] = None
    top_logprobs: Annotated[Any, only(0)] = None
    truncation: Annotated[Any, only("disabled")] = None
    stream_options: Any = None

    def chat(self) -> ChatRequest:
        messages: list[Message] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for message in self.input:
            if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":
                calls = [*messages[-1].get("tool_calls", ()), *message["tool_calls"]]
                messages[-1] = {**messages[-1], "tool_calls": calls}
            else:
                messages.append(message)
        return self._chat(
            messages=messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            max_tokens=self.max_output_tokens,
            logprobs=_LOGPROBS in self.include,
        )


class ResponsesReply(ChatReply):
    def whole(self, turn: Turn) -> dict[str, Any]:
        cut = turn.finish != "stop"
        status = "incomplete" if cut else "completed"
        return {
            **self._response(status, self._output(turn, status)),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": turn.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": len(turn.tokens),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": turn.prompt_tokens + len(turn.tokens),
            },
        }

    def first_event(self) -> bytes:
        return _event(0, "response.created", response=self._response("in_progress", []))

    def events(self, turn: Turn) -> Iterator[bytes]:
        whole = self.whole(turn)
        told: list[tuple[str, dict[str, Any]]] = []
        for index, item in enumerate(whole["output"]):
            told += _events_of(index, item)
        told.append((f"response.{whole['status']}", {"response": whole}))
        for number, (kind, fields) in enumerate(told, 1):
            yield _event(number, kind, **fields)

    def failure(self, error: ApiError) -> bytes:
        body = error_body(error)
        # For the field "error" clients raise an exception.
        about = {name: body["error"][name] for name in ("code", "message", "param")}
        return _event(1, "error", **about, **body)

    def _output(self, turn: Turn, status: str) -> list[dict[str, Any]]:
        text, calls = self.parts(turn)
        items: list[dict[str, Any]] = []
        if text or not calls:
            part = {"type": "output_text", "text": text, "annotations": []}
            content = [{**part, "logprobs": self.logprobs(turn)}]
            about = {"type": "message", "role": "assistant", "content": content}
            items.append({"id": f"msg_{self.id}", **about})
        for call in calls:
            about = {"call_id": call.id, "name": call.name, "arguments": call.json}
            items.append({"id": f"fc_{call.id}", "type": "function_call", **about})
        return [{**item, "status": status} for item in items]

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "tools": [{"type": "function", **tool["function"]} for tool in self.asked.tools],
            "tool_choice": self.asked.tool_choice,
            "parallel_tool_calls": True,
            "max_output_tokens": self.asked.limit,
            "usage": None,
        }


def _events_of(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and fields of the events that tell an output item."""
    at = {"output_index": index, "item_id": item["id"]}
    is_text = item["type"] == "message"
    begun: dict[str, Any] = {**item, "status": "in_progress"}
    begun["content" if is_text else "arguments"] = [] if is_text else ""
    yield "response.output_item.added", {"output_index": index, "item": begun}
    if is_text:
        (part,) = item["content"]
        at["content_index"] = 0
        same = {**at, "logprobs": part["logprobs"]}
        empty = {**part, "text": "", "logprobs": []}
        yield "response.content_part.added", {**at, "part": empty}
        yield "response.output_text.delta", {**same, "delta": part["text"]}
        yield "response.output_text.done", {**same, "text": part["text"]}
        yield "response.content_part.done", {**at, "part": part}
    else:
        named = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
        yield "response.function_call_arguments.done", {**at, **named}
    yield "response.output_item.done", {"output_index": index, "item": item}


def error_body(error: ApiError) -> dict[str, Any]:
    """In OpenAI's format. The messages of a chat completion are this API's input."""
    body = error.body()
    if (error.param or "").startswith("messages"):
        body["error"]["param"] = "input"
    return body


def _event(number: int, kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, "sequence_number": number, **fields}, kind)
