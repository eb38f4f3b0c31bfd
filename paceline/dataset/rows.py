"""Data set rows: the opener for each format, and prompts.

The order of rows, their values and the digest are the same on every machine, and memory does not
grow with the rows. datasets and pyarrow are imported only for data that needs them.
"""

import base64
import datetime
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.config.prompt_template import render
from paceline.config.sections.inputs import DataConfig
from paceline.dataset.messages import BadMessage, Message, normal_message
from paceline.dataset.row_source import Concatenated, DataError, JsonLines, Row, RowSource
from paceline.errors import one_line, seen_from
from paceline.process.structured_log import first_line

__all__ = ["DataError", "Message", "Row", "RowSource", "load_rows", "prompt_of"]

SAMPLED_ROWS = 4096


class ArrowRows(RowSource):
    """Rows of a ``datasets.Dataset``, including one with an indices mapping."""

    def __init__(self, dataset: Any, where: str) -> None:
        if dataset.num_rows == 0:
            raise DataError(f"{where}: has no rows")
        # Arrow format: values as they are stored, without decoding images or audio.
        self._dataset = dataset.with_format("arrow")
        self.where = where
        self.fields = tuple(dataset.column_names)
        self.digest = self._sampled_digest()

    def __len__(self) -> int:
        return int(self._dataset.num_rows)

    def _read(self, index: int) -> Row:
        try:
            stored = self._dataset[index].to_pylist()[0]
            row = {name: _without_filling(value) for name, value in stored.items()}
            text = json.dumps(row, default=_json_value)
        except Exception as error:  # a damaged page, text that is not UTF-8, a time out of range
            raise DataError(
                f"{self.where}: row {index} cannot be read: {one_line(error)}"
            ) from None
        # NaN and infinity have no JSON form and become null.
        plain: Row = json.loads(text, parse_constant=lambda _: None)
        return plain

    def _sampled_digest(self) -> str:
        """The library's own fingerprint depends on its version and on the path of the data."""
        last = len(self) - 1
        digest = hashlib.blake2b(json.dumps([last + 1, self.fields]).encode(), digest_size=16)
        for index in sorted({n * last // (SAMPLED_ROWS - 1) for n in range(SAMPLED_ROWS)}):
            digest.update(json.dumps(self[index], sort_keys=True).encode())
        return digest.hexdigest()


def open_parquet(path: Path) -> RowSource:
    from pyarrow import parquet

    with _library(f"{path}: not usable as Parquet") as datasets:
        if parquet.read_metadata(path).num_rows == 0:
            raise DataError(f"{path}: has no rows")
        loaded = datasets.load_dataset("parquet", data_files=str(path), split="train")
    return ArrowRows(loaded, str(path))


def open_saved(directory: Path, split: str) -> RowSource:
    """A data set written by ``save_to_disk``; if it has several splits, ``split``."""
    with _library(f"{directory}: cannot be loaded") as datasets:
        loaded = datasets.load_from_disk(str(directory))
    if isinstance(loaded, dict):
        if split not in loaded:
            there = ", ".join(map(str, loaded))
            raise DataError(f"{directory}: no split {split!r}; splits there: {there}")
        loaded = loaded[split]
    return ArrowRows(loaded, str(directory))


def open_hub(path: str, name: str | None, split: str) -> RowSource:
    """A data set by its hub name, from the local cache or the network."""
    problem = f"{path}: neither a local file or directory nor a data set of the Hugging Face hub"
    with _library(problem) as datasets:
        loaded = datasets.load_dataset(path, name, split=split)
    return ArrowRows(loaded, path if name is None else f"{path} ({name})")


@contextmanager
def _library(problem: str) -> Iterator[Any]:
    """The module ``datasets``, whose errors inside become a DataError of one line."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield datasets
    except DataError:
        raise
    except Exception as error:  # a dozen kinds: damaged file, no network, gated, no such split
        raise DataError(f"{problem}: {first_line(error.__cause__ or error)}") from None


def _without_filling(value: Any) -> Any:
    """``value`` without nulls inside: Arrow gives every struct of a column the fields of all."""
    if isinstance(value, dict):
        return {k: _without_filling(v) for k, v in value.items() if v is not None}
    return [_without_filling(each) for each in value] if isinstance(value, list) else value


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


OPENERS: dict[str, Callable[[Path], RowSource]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": JsonLines,
    ".parquet": open_parquet,
}
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
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


def prompt_of(row: Mapping[str, Any], data: DataConfig) -> str | list[Message]:
    """The prompt of a row: text to tokenise as it is, or messages for the chat template. Raises
    DataError."""
    field = data.prompt_field
    if data.prompt_template is None:
        prompt = value_of(row, data, "prompt_field")
    else:
        try:
            prompt = render(data.prompt_template, row)
        except KeyError as error:
            why = "which data.prompt_template takes"
            raise DataError(f"row has no field {error}, {why}; its fields: {_names(row)}") from None
    if isinstance(prompt, str) and not data.chat and data.system_prompt is None:
        if not prompt:
            raise DataError(f"field {field!r} is empty")
        return prompt + data.prompt_suffix
    if isinstance(prompt, str):
        messages: list[Message] = [{"role": "user", "content": prompt}]
    else:
        messages = messages_of(prompt, field)
    if data.prompt_suffix:
        asked = [message for message in messages if message["role"] == "user"]
        if not asked:
            raise DataError("data.prompt_suffix needs a message of the user")
        asked[-1]["content"] += data.prompt_suffix
    return with_system(messages, data)


def value_of(row: Mapping[str, Any], data: DataConfig, setting: str) -> Any:
    """The value of the field that ``setting`` of [data] names. Raises DataError without one."""
    field = getattr(data, setting)
    if (value := row.get(field)) is not None:
        return value
    if field in row:
        raise DataError(f"field {field!r} is null: give it a value, or leave the row out")
    found = f"row has no field {field!r}; its fields: {_names(row)}"
    raise DataError(found, f"Set data.{setting}")


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(row) or "none"


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
    # A file's name begins with its split, up to the first '-', '_' or '.'.
    names = re.compile(rf"({'|'.join(map(re.escape, (split, *SPLIT_NAMES)))})(?=[-_.]|$)")
    named = {path: found[1] for path in files if (found := names.match(path.stem))}
    if named:
        files = [path for path in files if named.get(path) == split]
    if not files:
        there = ", ".join(sorted(set(named.values())))
        raise DataError(f"{directory}: no files of the split {split!r}; splits there: {there}")
    return Concatenated([_open_file(path) for path in files], str(directory))


def _files_below(directory: Path) -> Iterator[Path]:
    """Data files, those behind symbolic links included. Each directory is entered once: links may
    lead back. Raises DataError for what holds rows, perhaps, and cannot be read."""

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}")

    entered = set()
    for place, folders, names in os.walk(directory, followlinks=True, onerror=fail):
        real = Path(place).resolve()
        folders[:] = sorted(n for n in folders if real not in entered and not n.startswith("."))
        if real in entered:
            continue
        entered.add(real)
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            known = path.suffix in OPENERS
            if not (path.is_file() if known else path.exists()):
                raise DataError(f"{path}: is no file that can be read")
            kind = path.with_suffix("") if path.suffix in PACKED else path
            if not known and kind.suffix.lower() in OPENERS:
                raise DataError(f"{path}: its rows would be left out: unpack, rename or move it")
            # Parquet data sets of other tools come with descriptions of themselves.
            if known and path.name not in DESCRIPTIONS:
                yield path
