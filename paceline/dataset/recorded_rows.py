"""Parts of recorded rows: the prompt and the completions of a row, as text or messages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config.fields import RowForm
from paceline.config.sections.training import DataConfig
from paceline.dataset.row_source import DataError, RowSource
from paceline.dataset.rows import (
    Message,
    check_fields,
    check_rows,
    messages_of,
    prompt_of,
    with_system,
)

Content = str | list[Message]

CHOSEN_REWARD, REJECTED_REWARD = 1.0, 0.0
ASSISTANT = "assistant"
_NEEDED = {
    RowForm.CHAT: ["messages_field"],
    RowForm.COMPLETION: ["prompt_field", "completion_field"],
    RowForm.PAIR: ["chosen_field", "rejected_field", "margin_field"],
    RowForm.LABELLED: ["prompt_field", "completion_field", "label_field"],
}


@dataclass(frozen=True, slots=True)
class RowParts:
    """A prompt, and completions of the same kind with their rewards. A pair has chosen first, and
    its margin is the difference of the rewards."""

    prompt: Content
    completions: tuple[Content, ...]
    rewards: tuple[float, ...]


def check_run_rows(rows: RowSource, data: DataConfig) -> None:
    """Raises DataError unless every row has the run's fields, and the first row is usable. Later
    ones may be malformed: their tasks are dropped."""
    form = data.row_form
    if form is None:
        check_rows(rows, data)
        return
    check_fields(rows, data, _NEEDED[form])
    try:
        parts_of(rows[0], data)
    except DataError as error:
        raise DataError(f"{rows.where}: first row: {error}") from None


def parts_of(row: Mapping[str, Any], data: DataConfig) -> RowParts:
    """Raises DataError if the row does not have the form that ``data`` names."""
    form = data.row_form
    if form is RowForm.CHAT:
        return _chat(row, data)
    if form is RowForm.PAIR:
        return _pair(row, data)
    value = _value(row, data, "completion_field")
    prompt, completions = _after_prompt(row, data, {"completion_field": value})
    reward = CHOSEN_REWARD
    if form is RowForm.LABELLED:
        reward = CHOSEN_REWARD if _label(row, data) else REJECTED_REWARD
    return RowParts(prompt, completions, (reward,))


def _chat(row: Mapping[str, Any], data: DataConfig) -> RowParts:
    field = str(data.messages_field)
    messages = with_system(messages_of(_value(row, data, "messages_field"), field), data)
    turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not turns:
        raise DataError(
            f"field {field!r} has no message of the assistant: there is nothing to train"
        )
    if turns[0] == 0:
        raise DataError(f"field {field!r} begins with the assistant: put what it answers before it")
    for i in turns:
        if not _says_something(messages[i]):
            raise DataError(f"field {field!r}: message {i}, of the assistant, is empty")
    return RowParts(messages[: turns[0]], (messages[turns[0] : turns[-1] + 1],), (CHOSEN_REWARD,))


def _pair(row: Mapping[str, Any], data: DataConfig) -> RowParts:
    names = ("chosen_field", "rejected_field")
    values = {name: _value(row, data, name) for name in names}
    whole = [_is_whole_chat(value) for value in values.values()]
    if all(whole):
        prompt, completions = _common_opening(values, data)
    elif any(whole):
        raise DataError("one of chosen and rejected is a whole chat, and the other is not")
    else:
        prompt, completions = _after_prompt(row, data, values)
    if completions[0] == completions[1]:
        raise DataError("chosen and rejected are equal: the pair says nothing")
    return RowParts(prompt, completions, (_margin(row, data), REJECTED_REWARD))


def _common_opening(
    values: Mapping[str, Any], data: DataConfig
) -> tuple[Content, tuple[Content, ...]]:
    if data.prompt_template is not None or data.prompt_suffix:
        name = "prompt_suffix" if data.prompt_template is None else "prompt_template"
        raise DataError(
            f"chosen and rejected are whole chats, which begin with their prompt: data.{name} has "
            "no effect on them. Remove it, and put its text into the messages"
        )
    chats = [
        with_system(messages_of(value, getattr(data, name)), data) for name, value in values.items()
    ]
    common = 0
    while common < min(map(len, chats)) and chats[0][common] == chats[1][common]:
        common += 1
    if not common:
        raise DataError("chosen and rejected do not begin with the same messages")
    for name, chat in zip(values, chats, strict=True):
        _check_answer(chat[common:], getattr(data, name))
    return chats[0][:common], tuple(chat[common:] for chat in chats)


def _after_prompt(
    row: Mapping[str, Any], data: DataConfig, values: Mapping[str, Any]
) -> tuple[Content, tuple[Content, ...]]:
    prompt = prompt_of(row, data)
    found = tuple(_following(prompt, v, getattr(data, name)) for name, v in values.items())
    return prompt, found


def _following(prompt: Content, value: Any, field: str) -> Content:
    if isinstance(prompt, str):
        if not isinstance(value, str):
            raise DataError(
                f"field {field!r} is no text, but the prompt is: set data.chat = true, or give "
                "both as messages"
            )
        if not value:
            raise DataError(f"field {field!r} is empty")
        return value
    messages = (
        [{"role": ASSISTANT, "content": value}]
        if isinstance(value, str)
        else messages_of(value, field)
    )
    _check_answer(messages, field)
    return messages


def _check_answer(messages: Sequence[Message], field: str) -> None:
    if not messages or messages[0]["role"] != ASSISTANT:
        raise DataError(
            f"field {field!r} does not answer the prompt: no message of the assistant follows"
        )
    if messages[-1]["role"] != ASSISTANT:
        raise DataError(f"field {field!r} does not end with a message of the assistant")
    if not all(_says_something(m) for m in messages if m["role"] == ASSISTANT):
        raise DataError(f"field {field!r} has an empty message of the assistant")


def _says_something(message: Message) -> bool:
    return bool(message["content"] or message.get("tool_calls"))


def _is_whole_chat(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and first.get("role") != ASSISTANT


def _value(row: Mapping[str, Any], data: DataConfig, name: str) -> Any:
    field = getattr(data, name)
    value = row.get(field)
    if value is None and field in row:
        raise DataError(f"field {field!r} is null")
    if value is None:
        there = ", ".join(row) or "none"
        raise DataError(f"row has no field {field!r}; its fields: {there}. Set data.{name}")
    return value


def _margin(row: Mapping[str, Any], data: DataConfig) -> float:
    if data.margin_field is None:
        return CHOSEN_REWARD
    value = _value(row, data, "margin_field")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise DataError(f"field {data.margin_field!r} is {value!r}: a margin is a number above 0")
    return float(value)


def _label(row: Mapping[str, Any], data: DataConfig) -> bool:
    value = _value(row, data, "label_field")
    if value not in (True, False):  # 1 and 0 are equal to them
        raise DataError(f"field {data.label_field!r} is {value!r}: a label is true or false")
    return bool(value)
