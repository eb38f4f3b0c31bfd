"""The body of a /v1/chat/completions request, as pydantic models. A field whose value would change
what is sampled, and that Paceline does not implement, is refused unless it has its neutral value.
Unknown fields are refused; a null field counts as left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from operator import eq
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError, to_json

from paceline.dataset.messages import BadMessage, Message, content_text
from rollout_worker.environments.base import Turn
from rollout_worker.environments.conversation import Conversation
from rollout_worker.environments.transcript import Transcript
from rollout_worker.openai_server.replies import (
    INVALID,
    UNSUPPORTED,
    calls_in,
    parse_arguments,
)


def only(*allowed: Any) -> AfterValidator:
    """Accepts the values that leave the sampling as it is without the field."""

    def check(value: Any) -> Any:
        if value not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise PydanticCustomError(UNSUPPORTED, f"not supported here, only {choices}")
        return value

    return AfterValidator(check)


def text_of(content: Any) -> str:
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
    if parse_arguments(tool) is None:
        raise PydanticCustomError(INVALID, "a function is expected that JSON can hold")
    return tool


_WITHOUT_EFFECT = {
    *("cache_control", "inference_geo", "metadata", "parallel_tool_calls", "prompt_cache_key"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "top_k", "user"),
}
"""Fields that change nothing about what is sampled: top_k is the run's."""


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if value is not None and name not in _WITHOUT_EFFECT
        }


class CalledFunction(Body):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(parse_arguments)] = {}


class CalledTool(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    role: str
    content: Annotated[str, BeforeValidator(text_of)] = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[CalledTool] | None, AfterValidator(lambda calls: calls or None)] = (
        None
    )
    function_call: Annotated[Any, only(None)] = None
    audio: Annotated[Any, only(None)] = None

    @model_validator(mode="after")
    def _only_the_assistant_calls(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError(INVALID, "only the assistant calls tools")
        return self


class StreamOptions(Body):
    include_usage: bool = False


def _ends_with_input(messages: list[ChatMessage]) -> list[ChatMessage]:
    if messages[-1].role == "assistant":
        raise PydanticCustomError(INVALID, "the last message must not be the assistant's")
    return messages


Count = Annotated[int, Field(ge=1, lt=1 << 63)]
Stop = Annotated[str, Field(min_length=1)]


class ChatRequest(Body):
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
    tool_choice: Annotated[Any, only("auto", "none")] = "auto"

    n: Annotated[Any, only(1)] = 1
    frequency_penalty: Annotated[Any, only(0)] = 0
    presence_penalty: Annotated[Any, only(0)] = 0
    top_logprobs: Annotated[Any, only(0)] = 0
    logit_bias: Annotated[Any, only({})] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    modalities: Annotated[Any, only(["text"])] = None

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


class Translated(Body):
    """The body of another API. What both call the same is checked as that of a chat completion."""

    model_config = ConfigDict(extra="forbid")

    model: str
    temperature: Any = None
    top_p: Any = None
    stream: Any = None

    def chat(self) -> ChatRequest:
        """Raises ValidationError."""
        raise NotImplementedError

    def _chat(self, **fields: Any) -> ChatRequest:
        same = {name: getattr(self, name) for name in Translated.model_fields}
        return ChatRequest.model_validate_json(to_json({**same, **fields}))


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a request in its sample. ``transcript``: that it extends, perhaps a new branch;
    ``new``: its messages after those of the transcript; ``calls``: of the turn before them."""

    transcript: Transcript
    new: list[Message]
    calls: Sequence[Mapping[str, Any]] = ()


def place_of(
    conversation: Conversation,
    sent: list[Message],
    tools: Sequence[Mapping[str, Any]],
    threshold: int,
) -> Place:
    """The transcript whose past agrees with ``sent`` the furthest, or a branch of it if it has gone
    on in another way or is about to. A request with other tools, or whose beginning is in none,
    begins one of its own. ``threshold``: rollout.branch_threshold."""
    rank, found = (0, 0, False), None
    for transcript in conversation.transcripts:
        pieces, at, differ = _common_past(transcript, sent, tools, threshold)
        goes_on = pieces == len(transcript.pieces) and transcript.running is None
        if pieces and (at, -differ, goes_on) >= rank:
            rank = at, -differ, goes_on
            found = transcript if goes_on else transcript.branch(pieces)
    if found is None:
        begun = Transcript() if conversation.transcripts else conversation.named[0]
        begun.raced = not conversation.turns
        return Place(begun, sent)
    at, *_ = rank
    return Place(found, sent[at:], sent[at - 1].get("tool_calls") or ())


def answered(
    conversation: Conversation, sent: list[Message], tools: Sequence[Mapping[str, Any]]
) -> Turn | None:
    """The turn that was made for the same request and has not been told yet; None if there is none.
    Calls side by side may be equal, and each of them has a turn of its own."""
    for transcript in conversation.transcripts:
        pieces, at, _ = _common_past(transcript, sent, tools, 0)
        for piece in transcript.pieces[pieces : pieces + 1]:
            is_same = piece.messages is not None and piece.messages[:-1] == sent[at:]
            if is_same and piece.turn.number not in conversation.told:
                return piece.turn
    return None


def _common_past(
    transcript: Transcript,
    sent: list[Message],
    tools: Sequence[Mapping[str, Any]],
    threshold: int,
) -> tuple[int, int, int]:
    """Pieces of the transcript with which ``sent`` begins, the messages in them, and the characters
    in which they differ."""
    at = total = 0
    for number, piece in enumerate(transcript.pieces if transcript.tools == tools else ()):
        past = piece.messages or []
        pairs = list(zip(past, sent[at:], strict=False))
        differ = [_difference(old, new) for old, new in pairs]
        # Only the last message is a turn that the sample made; the others are the client's.
        if len(pairs) < len(past) or not past or any(differ[:-1]) or differ[-1] > threshold:
            return number, at, total
        at, total = at + len(past), total + int(sum(differ))
    return len(transcript.pieces) if at else 0, at, total


def _difference(old: Message, new: Message) -> float:
    """Characters in which a message of the model was changed; inf if it is another one. Blanks do
    not count, nor does the form of a call's JSON."""
    if old["role"] != new["role"] or old["role"] != "assistant":
        return 0 if dict(old) == dict(new) else inf
    text, sent = str(old["content"]), str(new["content"])
    calls: Any = old.get("tool_calls")
    sent_calls: Any = new.get("tool_calls")
    if sent_calls and not calls:
        text, calls = calls_in(text)
        functions = [call["function"] for call in sent_calls]  # Ids are the client's own affair
        sent_calls = [(f["name"], f["arguments"]) for f in functions]
    if calls != sent_calls:
        return inf
    one, other = " ".join(text.split()), " ".join(sent.split())
    if one == other:
        return 0
    start = _agreeing(one, other)
    one, other = one[start:], other[start:]
    return max(len(one), len(other)) - _agreeing(one[::-1], other[::-1])


def _agreeing(one: str, other: str) -> int:
    """Characters with which both begin."""
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))
