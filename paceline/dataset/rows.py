"""Data set rows: the opener for each format, the checks of a run's fields, and prompts.

The order of rows, their values and the digest are the same on every machine, and memory does not
grow with the rows. datasets and pyarrow are imported only for data that needs them.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.config.prompt_template import placeholders, render
from paceline.config.sections.training import DataConfig
from paceline.dataset.arrow_dataset import open_hub, open_parquet, open_saved
from paceline.dataset.messages import BadMessage, Message, normal_message
from paceline.dataset.row_source import Concatenated, DataError, JsonLines, Row, RowSource
from paceline.errors import seen_from

__all__ = ["DataError", "Message", "Row", "RowSource", "check_rows", "load_rows", "prompt_of"]

OPENERS: dict[str, Callable[[Path], RowSource]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": JsonLines,
    ".parquet": open_parquet,
}
DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json")
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")


def load_rows(path: str | Path, *, name: str | None = None, split: str = "train") -> RowSource:
    """Opens a file; a directory of files, those of ``split`` if they are named for splits; one
    written by ``datasets.save_to_disk``; or a data set of the hub (``name``: configuration). Raises
    DataError."""
    text = os.fspath(path)
    local = Path(text).expanduser()
    if local.is_file():
        return _open_file(local)
    if local.is_dir():
        if any((local / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            return open_saved(local, split)
        return _open_directory(local, split)
    if could_be_hub_name(text):
        return open_hub(text, name, split)
    raise DataError(f"{text}: no such file or directory{seen_from(text)}")


def check_fields(rows: RowSource, data: DataConfig, names: Iterable[str]) -> None:
    """Raises DataError unless every row has the fields of these settings, and those that
    data.prompt_template takes in place of the prompt field."""
    template = data.prompt_template
    fields = {name: getattr(data, name) for name in names}
    wanted = [(field, f". Set data.{name}") for name, field in fields.items() if field is not None]
    if template is not None:
        wanted = [pair for pair in wanted if not pair[1].endswith("prompt_field")]
        taken = ". data.prompt_template takes it"
        wanted = [*((field, taken) for field in placeholders(template)), *wanted]
    for field, why in wanted:
        if (place := rows.lacking(field)) is not None:
            there = ", ".join(rows.fields) or "none"
            raise DataError(f"{place}: no field {field!r}; fields of every row: {there}{why}")


def check_rows(rows: RowSource, data: DataConfig) -> None:
    """Raises DataError unless every row has the fields, and the first row's prompt is usable."""
    check_fields(rows, data, ("prompt_field", "answer_field"))
    try:
        prompt_of(rows[0], data)
    except DataError as error:
        raise DataError(f"{rows.where}: first row: {error}") from None


def prompt_of(row: Mapping[str, Any], data: DataConfig) -> str | list[Message]:
    """The prompt of a row: text to tokenise as it is, or messages for the chat template. Raises
    DataError."""
    field = data.prompt_field
    if data.prompt_template is not None:
        prompt: Any = _rendered(row, data.prompt_template)
    elif field in row:
        prompt = row[field]
    else:
        there = ", ".join(row) or "none"
        raise DataError(f"row has no field {field!r}; its fields: {there}. Set data.prompt_field")
    if isinstance(prompt, str):
        if not data.chat:
            if data.system_prompt is not None:
                raise DataError(
                    "data.system_prompt needs chat messages: set data.chat = true, or put the text"
                    f" into the field {field!r}"
                )
            if not prompt:
                raise DataError(f"field {field!r} is empty")
            return prompt + data.prompt_suffix
        messages: list[Message] = [{"role": "user", "content": prompt}]
    else:
        messages = messages_of(prompt, field)
    if data.prompt_suffix:
        _append(messages, data.prompt_suffix)
    return with_system(messages, data)


def _rendered(row: Mapping[str, Any], template: str) -> str:
    try:
        return render(template, row)
    except KeyError as error:
        there = ", ".join(row) or "none"
        raise DataError(
            f"row has no field {error}, which data.prompt_template takes; its fields: {there}"
        ) from None


def _append(messages: list[Message], suffix: str) -> None:
    asked = [message for message in messages if message["role"] == "user"]
    if not asked:
        raise DataError("data.prompt_suffix needs a message of the user")
    asked[-1]["content"] += suffix


def with_system(messages: list[Message], data: DataConfig) -> list[Message]:
    if data.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": data.system_prompt}, *messages]


def messages_of(prompt: object, field: str) -> list[Message]:
    """Chat messages from the value of ``field``. Raises DataError."""
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"field {field!r} is neither text nor a list of chat messages")
    try:
        return [normal_message(message) for message in prompt]
    except BadMessage as error:
        raise DataError(f"field {field!r}: {error}") from None


def could_be_hub_name(text: str) -> bool:
    return (
        bool(text)
        and not text.startswith(("/", ".", "~"))
        and text.count("/") <= 1
        and not text.endswith((*OPENERS, "/"))
    )


def _open_file(path: Path) -> RowSource:
    if path.suffix not in OPENERS:
        raise DataError(f"{path}: unknown kind of file; expected {', '.join(OPENERS)}")
    return OPENERS[path.suffix](path)


def _open_directory(directory: Path, split: str) -> RowSource:
    files = sorted(_files_below(directory))
    if not files:
        raise DataError(f"{directory}: no files ending in {', '.join(OPENERS)}")
    named = {path: _split_named(path, split) for path in files}
    if any(named.values()):
        chosen = [path for path in files if named[path] == split]
        if not chosen:
            there = ", ".join(sorted({value for value in named.values() if value}))
            raise DataError(f"{directory}: no files of the split {split!r}; splits there: {there}")
        files = chosen
    return Concatenated([_open_file(path) for path in files], str(directory))


def _files_below(directory: Path) -> Iterator[Path]:
    """Data files, those behind symbolic links included. Raises DataError for links in a circle."""
    entered = {directory: directory.resolve()}
    for place, folders, names in os.walk(directory, followlinks=True):
        here = Path(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            real = (here / name).resolve()
            if real in (entered[parent] for parent in (here, *here.parents) if parent in entered):
                raise DataError(f"{here / name}: a symbolic link leads back to {real}: remove it")
            entered[here / name] = real
        paths = (here / name for name in names if not name.startswith("."))
        # Parquet data sets of other tools come with descriptions of themselves.
        yield from (p for p in paths if p.suffix in OPENERS and p.name not in DESCRIPTIONS)


def _split_named(path: Path, split: str) -> str | None:
    """The split that a file's name begins with, up to the first '-', '_' or '.'."""
    names = "|".join(map(re.escape, (split, *SPLIT_NAMES)))
    found = re.match(rf"({names})(?=[-_.]|$)", path.stem)
    return found and found[1]
