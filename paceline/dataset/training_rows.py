"""Rows of a run, from one source or several: their checks, and the parts of recorded rows, a prompt
and completions as text or messages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from paceline.config.fields import RowForm
from paceline.config.prompt_template import placeholders
from paceline.config.sections.inputs import DataConfig, SourceConfig
from paceline.dataset.data_order import DataSource, shares
from paceline.dataset.row_source import Concatenated, DataError, RowSource
from paceline.dataset.rows import (
    Message,
    load_rows,
    messages_of,
    prompt_of,
    value_of,
    with_system,
)

Content = str | list[Message]

CHOSEN_REWARD, REJECTED_REWARD = 1.0, 0.0
ASSISTANT = "assistant"
_NEEDED = {
    None: ["prompt_field", "answer_field"],
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


def load_rows_of(path: str, data: DataConfig, *, name: str | None, split: str) -> RowSource:
    """The rows of load_rows. Raises DataError unless every row has the run's fields, and the first
    row is usable. Later ones may be malformed: their tasks are dropped."""
    rows = load_rows(path, name=name, split=split)
    check_rows(rows, data)
    return rows


def check_rows(rows: RowSource, data: DataConfig) -> None:
    needed = {f"Set data.{name}": getattr(data, name) for name in _NEEDED[data.row_form]}
    wanted = [(field, remedy) for remedy, field in needed.items() if field is not None]
    if data.prompt_template is not None:
        taken = placeholders(data.prompt_template)
        wanted = [pair for pair in wanted if pair[1] != "Set data.prompt_field"]
        wanted = [*((field, "data.prompt_template takes it") for field in taken), *wanted]
    for field, why in wanted:
        if (place := rows.lacking(field)) is not None:
            there = ", ".join(rows.fields) or "none"
            raise DataError(f"{place}: no field {field!r}; fields of every row: {there}", why)
    try:
        (prompt_of if data.row_form is None else parts_of)(rows[0], data)
    except DataError as error:
        found = f"{rows.where}: first row: {error.found}"
        raise DataError(found, error.remedy) from None


def parts_of(row: Mapping[str, Any], data: DataConfig) -> RowParts:
    """Raises DataError if the row does not have the form that ``data`` names."""
    form = data.row_form
    if form is RowForm.CHAT:
        return _chat(row, data)
    if form is RowForm.PAIR:
        return _pair(row, data)
    prompt, completions = _after_prompt(row, data, ["completion_field"])
    good = True
    if form is RowForm.LABELLED:
        good = value_of(row, data, "label_field")
        if good not in (True, False):  # 1 and 0 are equal to them
            raise DataError(f"field {data.label_field!r} is {good!r}: a label is true or false")
    return RowParts(prompt, completions, (CHOSEN_REWARD if good else REJECTED_REWARD,))


def _chat(row: Mapping[str, Any], data: DataConfig) -> RowParts:
    messages, field = _whole_chat(row, data, "messages_field"), data.messages_field
    turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not turns:
        raise DataError(
            f"field {field!r} has no message of the assistant: there is nothing to train"
        )
    if turns[0] == 0:
        raise DataError(f"field {field!r} begins with the assistant: put what it answers before it")
    _check_said(messages, field)
    return RowParts(messages[: turns[0]], (messages[turns[0] : turns[-1] + 1],), (CHOSEN_REWARD,))


def _pair(row: Mapping[str, Any], data: DataConfig) -> RowParts:
    names = ("chosen_field", "rejected_field")
    whole = [_is_whole_chat(value_of(row, data, name)) for name in names]
    if all(whole):
        prompt, completions = _common_opening(row, data, names)
    elif any(whole):
        raise DataError("one of chosen and rejected is a whole chat, and the other is not")
    else:
        prompt, completions = _after_prompt(row, data, names)
    if completions[0] == completions[1]:
        raise DataError("chosen and rejected are equal: the pair says nothing")
    margin = CHOSEN_REWARD if data.margin_field is None else value_of(row, data, "margin_field")
    number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not number or not math.isfinite(margin) or margin <= 0:
        raise DataError(f"field {data.margin_field!r} is {margin!r}: a margin is a number above 0")
    return RowParts(prompt, completions, (float(margin), REJECTED_REWARD))


def _common_opening(
    row: Mapping[str, Any], data: DataConfig, names: Sequence[str]
) -> tuple[Content, tuple[Content, ...]]:
    for name in ("prompt_template", "prompt_suffix"):
        if getattr(data, name):
            raise DataError(
                "chosen and rejected are whole chats, which begin with their prompt: data."
                f"{name} has no effect on them. Remove it, and put its text into the messages"
            )
    chats = [_whole_chat(row, data, name) for name in names]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*chats, strict=False))
    common = len(list(same))
    if not common:
        raise DataError("chosen and rejected do not begin with the same messages")
    for name, chat in zip(names, chats, strict=True):
        _check_answer(chat[common:], getattr(data, name))
    return chats[0][:common], tuple(chat[common:] for chat in chats)


def _whole_chat(row: Mapping[str, Any], data: DataConfig, name: str) -> list[Message]:
    return with_system(messages_of(value_of(row, data, name), getattr(data, name)), data)


def _after_prompt(
    row: Mapping[str, Any], data: DataConfig, names: Sequence[str]
) -> tuple[Content, tuple[Content, ...]]:
    prompt = prompt_of(row, data)
    return prompt, tuple(
        _following(prompt, value_of(row, data, name), getattr(data, name)) for name in names
    )


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
    if isinstance(value, str):
        value = [{"role": ASSISTANT, "content": value}]
    messages = messages_of(value, field)
    _check_answer(messages, field)
    return messages


def _check_answer(messages: Sequence[Message], field: str) -> None:
    if not messages or messages[0]["role"] != ASSISTANT:
        raise DataError(
            f"field {field!r} does not answer the prompt: no message of the assistant follows"
        )
    if messages[-1]["role"] != ASSISTANT:
        raise DataError(f"field {field!r} does not end with a message of the assistant")
    _check_said(messages, field)


def _check_said(messages: Sequence[Message], field: str | None) -> None:
    for number, message in enumerate(messages):
        said = message["content"] or message.get("tool_calls")
        if message["role"] == ASSISTANT and not said:
            raise DataError(f"field {field!r}: message {number}, of the assistant, is empty")


def _is_whole_chat(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and first.get("role") != ASSISTANT


def open_training_rows(data: DataConfig) -> tuple[RowSource, tuple[DataSource, ...]]:
    """The checked rows of ``data``, and its sources in their order; none if there is one source
    without a name. Raises DataError."""
    if data.path is not None:
        return load_rows_of(data.path, data, name=data.name, split=data.split), ()
    # By name: the order of the tables in the file decides nothing.
    names = sorted(data.sources)
    parts = [open_source(name, data.sources[name], data) for name in names]
    weights = [w for name in names if (w := data.sources[name].weight) is not None]
    counts = shares(weights) if len(weights) == len(names) else (0,) * len(names)
    sources = tuple(map(DataSource, names, map(len, parts), counts))
    return Concatenated(parts, data.described), sources


def open_source(name: str, source: SourceConfig, data: DataConfig) -> RowSource:
    common = {}
    for setting, own in source.renamed_fields.items():
        if (name_of_all := getattr(data, setting)) is None:
            raise DataError(
                f"data.sources.{name}: {setting} = {own!r}, but data.{setting} is none: set it to "
                "the name that the field has in all sources"
            )
        common[name_of_all] = own
    try:
        rows = load_rows(source.path, name=source.name, split=source.split)
        rows.renamed = common
        check_rows(rows, data)
    except DataError as error:
        raise DataError(f"data.sources.{name}: {error}") from None
    return rows
