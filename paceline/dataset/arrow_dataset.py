"""Rows of Parquet files and Hugging Face data sets, which ``datasets`` keeps memory-mapped."""

import base64
import datetime
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.dataset.row_source import DataError, Row, RowSource
from paceline.errors import one_line
from paceline.process.structured_log import first_line

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
