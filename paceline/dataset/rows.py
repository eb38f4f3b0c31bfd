"""Rows of a data set, whatever it is stored as.

``load_rows`` opens JSONL and Parquet files, directories of them, and Hugging Face data sets (saved
to disk, or by hub name). What it returns holds true of every kind:

* the order of rows, their values and the digest are the same on every machine;
* row values can be written as JSON;
* a row is parsed when it is asked for: memory grows by 8 bytes a row, not by its text;
* whatever is wrong with the input is one :class:`DataError` of one line, when it is opened.

pyarrow and datasets are imported only for data that needs them.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from paceline.config.schema import DataConfig
from paceline.errors import BadInput

Row = dict[str, Any]
Message = dict[str, Any]

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
SUFFIXES = (*JSONL_SUFFIXES, ".parquet")
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")


class DataError(BadInput):
    """The data set cannot be used. The message is one line that names the file and the remedy."""


class RowSource(ABC):
    """A sequence of rows that stays on disk. Safe to read from several threads."""

    digest: str
    """32 hexadecimal digits; equal where the rows are equal and stored alike."""
    fields: Sequence[str]
    """Names that every row has."""
    where: str
    """What a person would call the source."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Row:
        """The row at ``index``, 0 to len - 1, as values JSON can hold. IndexError beyond."""

    def lacking(self, field: str) -> str | None:
        """Where the first row without ``field`` is, for an error message; None if all have it."""
        return None if field in self.fields else self.where


def load_rows(path: str | Path, *, name: str | None = None, split: str = "train") -> RowSource:
    """Opens a data set.

    ``path``: a .jsonl or .parquet file, a directory of such files (in order of their names; where
    files are named for splits, such as ``train-00000.parquet``, those of ``split`` only), a
    directory written by ``datasets.save_to_disk``, or a hub name such as ``openai/gsm8k``.
    ``name``: configuration of a hub data set. Raises DataError.
    """
    text = os.fspath(path)
    local = Path(text).expanduser()
    if local.is_file():
        return _open_file(local)
    if local.is_dir():
        if any((local / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            from paceline.dataset.arrow_dataset import from_disk

            return from_disk(local, split)
        return _open_directory(local, split)
    if _could_be_hub_name(text):
        from paceline.dataset.arrow_dataset import from_hub

        return from_hub(text, name, split)
    raise DataError(f"{text}: no such file or directory")


def check_fields(rows: RowSource, prompt_field: str, answer_field: str | None) -> None:
    """Raises DataError, naming the fields there are, unless every row has both fields."""
    for setting, field in (
        ("data.prompt_field", prompt_field),
        ("data.answer_field", answer_field),
    ):
        if field is None:
            continue
        place = rows.lacking(field)
        if place is not None:
            there = ", ".join(rows.fields) or "none"
            raise DataError(
                f"{place}: no field {field!r}; fields of every row: {there}. Set {setting}"
            )


def check_rows(rows: RowSource, data: DataConfig) -> None:
    """Raises DataError unless every row has the fields, and the first row's prompt is usable.

    Later rows may still be malformed: their tasks are dropped, with a reason, when they are leased.
    """
    check_fields(rows, data.prompt_field, data.answer_field)
    try:
        prompt_of(rows[0], data)
    except DataError as error:
        raise DataError(f"{rows.where}: first row: {error}") from None


def prompt_of(row: Mapping[str, Any], data: DataConfig) -> str | list[Message]:
    """The prompt of a row: text to tokenise as it is, or messages for the chat template.

    Messages come with ``data.system_prompt`` in front, unless the row brings a system message of
    its own. Raises DataError for a prompt that is neither text nor messages.
    """
    field = data.prompt_field
    if field not in row:
        there = ", ".join(row) or "none"
        raise DataError(f"row has no field {field!r}; its fields: {there}. Set data.prompt_field")
    prompt = row[field]
    if isinstance(prompt, str):
        if not data.chat:
            if data.system_prompt is not None:
                raise DataError(
                    "data.system_prompt needs chat messages: set data.chat = true, or put the text"
                    f" into the field {field!r}"
                )
            if not prompt:
                raise DataError(f"field {field!r} is empty")
            return prompt
        messages: list[Message] = [{"role": "user", "content": prompt}]
    else:
        messages = _messages(prompt, field)
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return messages


def _messages(prompt: object, field: str) -> list[Message]:
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"field {field!r} is neither text nor a list of chat messages")
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"field {field!r}: a chat message needs role and content")
    return [dict(message) for message in prompt]


def _could_be_hub_name(text: str) -> bool:
    """Hub names are ``name`` or ``owner/name``; anything that looks like a path is one."""
    return (
        not text.startswith(("/", ".", "~"))
        and text.count("/") <= 1
        and not text.endswith((*SUFFIXES, "/"))
        and bool(text)
    )


def _open_file(path: Path) -> RowSource:
    if path.suffix in JSONL_SUFFIXES:
        return JsonLines(path)
    if path.suffix == ".parquet":
        from paceline.dataset.arrow_dataset import from_parquet

        return from_parquet([path])
    raise DataError(f"{path}: unknown kind of file; expected {', '.join(SUFFIXES)}")


def _open_directory(directory: Path, split: str) -> RowSource:
    files = sorted(
        path
        for path in directory.rglob("*")
        if path.suffix in SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    )
    if not files:
        raise DataError(f"{directory}: no files ending in {', '.join(SUFFIXES)}")
    named = {path: _split_named(path, split) for path in files}
    if any(named.values()):
        chosen = [path for path in files if named[path] == split]
        if not chosen:
            there = ", ".join(sorted({value for value in named.values() if value}))
            raise DataError(f"{directory}: no files of the split {split!r}; splits there: {there}")
        files = chosen
    if all(path.suffix == ".parquet" for path in files):
        from paceline.dataset.arrow_dataset import from_parquet

        return from_parquet(files)
    return Concatenated([_open_file(path) for path in files], str(directory))


def _split_named(path: Path, wanted: str) -> str | None:
    """The split a file's name stands for: its name up to the first '-', '_' or '.'."""
    for split in (wanted, *SPLIT_NAMES):
        rest = path.stem.removeprefix(split)
        if rest != path.stem and (not rest or rest[0] in "-_."):
            return split
    return None


class JsonLines(RowSource):
    """One JSON object a line. Blank lines are skipped.

    Opening it reads and parses the file once, so that a bad line fails the start of a run and not
    its thousandth step; after that only the offsets of rows are held.
    """

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._starts = array("Q")
        self._lacking: dict[str, int] = {}
        digest = hashlib.blake2b(digest_size=16)
        try:
            # Held open: a file replaced during the run must not change the rows of the run.
            self._file = path.open("rb", buffering=1 << 20)
            self._scan(digest)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        if not self._starts:
            raise DataError(f"{path}: has no rows")
        self.digest = digest.hexdigest()

    def _scan(self, digest: hashlib.blake2b) -> None:
        offset = 0
        fields: dict[str, None] = {}
        for number, line in enumerate(self._file, start=1):
            start, offset = offset, offset + len(line)
            digest.update(line)
            if not line.strip():
                continue
            row = self._parse(line, number)
            if row.keys() != fields.keys():
                if not self._starts:
                    fields = dict.fromkeys(row)
                for field in [field for field in fields if field not in row]:
                    del fields[field]
                    self._lacking[field] = number
            self._starts.append(start)
        self.fields = tuple(fields)
        self._end = offset

    def _parse(self, line: bytes, number: int) -> Row:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8 text"
            hint = "; one JSON object a line is expected" if number == 1 else ""
            raise DataError(f"{self.where}:{number}: bad JSON: {reason}{hint}") from None
        if not isinstance(row, dict):
            raise DataError(f"{self.where}:{number}: not a JSON object; one a line is expected")
        return row

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self._starts):
            raise IndexError(f"row {index} of {len(self._starts)}")
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self._starts) else self._end
        # pread keeps no file position, so threads do not disturb one another.
        data = os.pread(self._file.fileno(), end - start, start)
        try:
            row: Row = json.loads(data)
        except ValueError:
            raise DataError(f"{self.where}: row {index} changed while the run used it") from None
        return row

    def lacking(self, field: str) -> str | None:
        if field in self.fields:
            return None
        return f"{self.where}:{self._lacking.get(field, 1)}"


class Concatenated(RowSource):
    """Several sources, one after the other."""

    def __init__(self, parts: Sequence[RowSource], where: str) -> None:
        self.where = where
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))
        self.fields = [f for f in parts[0].fields if all(f in part.fields for part in parts)]
        self.digest = combined_digest(part.digest for part in parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]

    def lacking(self, field: str) -> str | None:
        places = (part.lacking(field) for part in self._parts)
        return next((place for place in places if place is not None), None)


def combined_digest(digests: Iterable[str]) -> str:
    """One digest for a sequence of them."""
    return hashlib.blake2b(" ".join(digests).encode(), digest_size=16).hexdigest()
