"""The body of a /v1/chat/completions request, as pydantic models. A field whose value would change
what is sampled, and that Paceline does not implement, is refused unless it has its neutral value.
Unknown fields are refused; a null field counts as left out."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.dataset.messages import BadMessage, Message, content_text
from rollout_worker.openai_server.replies import (
    INVALID,
    UNSUPPORTED,
    ApiError,
    calls_in,
    parse_arguments,
)


def _only(*allowed: Any) -> AfterValidator:
    """Accepts the values that leave the sampling as it is without the field."""

    def check(value: Any) -> Any:
        if value not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise PydanticCustomError(UNSUPPORTED, f"not supported here, only {choices}")
        return value

    return AfterValidator(check)


def _text(content: Any) -> str:
    try:
        return content_text(content)
    except BadMessage as error:
        raise PydanticCustomError(UNSUPPORTED, "{why}", {"why": str(error)}) from None


def _function_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Returned as it was sent: the chat template renders every field of it."""
    function = tool.get("function")
    if tool.get("type") not in (None, "function"):
        raise PydanticCustomError(UNSUPPORTED, "only functions are supported")
    if "type" not in tool or not isinstance(function, dict):
        raise PydanticCustomError(INVALID, "an object with type and function is expected")
    if not isinstance(function.get("name"), str):
        raise PydanticCustomError(INVALID, "a function with a name is expected")
    return tool


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class CalledFunction(_Body):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(parse_arguments)] = {}


class CalledTool(_Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Body):
    role: str
    content: Annotated[str, BeforeValidator(_text)] = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[CalledTool] | None, AfterValidator(lambda calls: calls or None)] = (
        None
    )
    function_call: Annotated[Any, _only(None)] = None
    audio: Annotated[Any, _only(None)] = None

    @model_validator(mode="after")
    def _only_the_assistant_calls(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError(INVALID, "only the assistant calls tools")
        return self


class StreamOptions(_Body):
    include_usage: bool = False


def _ends_with_input(messages: list[ChatMessage]) -> list[ChatMessage]:
    if messages[-1].role == "assistant":
        raise PydanticCustomError(INVALID, "the last message must not be the assistant's")
    return messages


Count = Annotated[int, Field(ge=1, lt=1 << 63)]
Stop = Annotated[str, Field(min_length=1)]


class ChatRequest(_Body):
    """Fields that the client left out are None."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1), AfterValidator(_ends_with_input)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[
        list[Stop],
        Field(max_length=16),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = []
    logprobs: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    tools: list[Annotated[dict[str, Any], AfterValidator(_function_tool)]] = []
    tool_choice: Annotated[Any, _only("auto", "none")] = "auto"

    n: Annotated[Any, _only(1)] = 1
    frequency_penalty: Annotated[Any, _only(0)] = 0
    presence_penalty: Annotated[Any, _only(0)] = 0
    top_logprobs: Annotated[Any, _only(0)] = 0
    logit_bias: Annotated[Any, _only({})] = None
    functions: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only("none", "auto")] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    modalities: Annotated[Any, _only(["text"])] = None

    # These change nothing about what is sampled.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None

    @property
    def limit(self) -> int | None:
        """Most tokens of the turn."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def reports_calls(self) -> bool:
        """Text that looks like a tool call is reported as one."""
        return bool(self.tools) and self.tool_choice == "auto"

    def conversation(self) -> list[Message]:
        """The messages for the chat template. A tool's answer gets the tool's name, which clients
        leave out and some templates need."""
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        names: dict[str, str] = {}
        for message in messages:
            for call in message.get("tool_calls", ()):
                names[call["id"]] = call["function"]["name"]
            if message["role"] == "tool" and message.get("tool_call_id") in names:
                message.setdefault("name", names[message["tool_call_id"]])
        return messages


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
    functions = [call["function"] for call in new["tool_calls"]]  # Ids are the client's own affair
    return rest.strip() == sent and calls == [(f["name"], f["arguments"]) for f in functions]


def _diverged(why: str) -> ApiError:
    return ApiError(400, why, DIVERGED, "messages")
