"""Rows stored as columns: Parquet files and Hugging Face data sets, read through Arrow.

Both end as a memory-mapped Arrow table: the operating system pages rows in and out, the process
holds none of them.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import math
import os
import socket
import tempfile
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.dataset.rows import DataError, Row, RowSource, combined_digest

WHOLE_FILE_BYTES = 64 << 20
SAMPLE_BYTES = 1 << 20
SAMPLES = 16
SAMPLED_ROWS = 256

_HUB_ROUTES = (
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
)


class ArrowRows(RowSource):
    """A table's rows, converted one at a time."""

    def __init__(self, table: Any, *, where: str, digest: str) -> None:
        if table.num_rows == 0:
            raise DataError(f"{where}: has no rows")
        self._table = table
        self.where = where
        self.digest = digest
        self.fields = tuple(table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return _plain_row(self._table.slice(index, 1).to_pylist()[0])


class HubRows(RowSource):
    """A ``datasets.Dataset``. Its indices mapping, if it has one, is followed."""

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

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return _plain_row(self._dataset[index].to_pylist()[0])

    def _sampled_digest(self) -> str:
        """Over the row count, the fields and evenly spaced rows.

        The library's own fingerprint depends on its version and on the path it was loaded from.
        """
        total = len(self)
        picked = sorted({i * (total - 1) // (SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)})
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([total, self.fields]).encode())
        for index in picked:
            digest.update(json.dumps(self[index], sort_keys=True).encode())
        return digest.hexdigest()


def from_parquet(paths: Sequence[Path]) -> RowSource:
    """Rows of Parquet files of one schema, in the order given.

    Parquet is compressed in row groups of many thousand rows, and a shuffled run asks for one row
    here and one there: so it is unpacked once, group by group, into a nameless temporary file.
    """
    handle, unpacked = tempfile.mkstemp(prefix="paceline-rows-", suffix=".arrow")
    os.close(handle)
    try:
        schema: Any = None
        with pa.OSFile(unpacked, "wb") as sink:
            writer: Any = None
            for path in paths:
                try:
                    with pq.ParquetFile(path) as parquet:
                        if writer is None:
                            schema = parquet.schema_arrow.remove_metadata()
                            writer = pa.ipc.new_file(sink, schema)
                        for batch in parquet.iter_batches(batch_size=4096):
                            writer.write_table(pa.Table.from_batches([batch]).cast(schema))
                except (pa.ArrowException, ValueError) as error:
                    raise DataError(f"{path}: not usable as Parquet: {_line(error)}") from None
                except OSError as error:
                    raise DataError(f"{path}: cannot be read: {_line(error)}") from None
            writer.close()
        table = pa.ipc.open_file(pa.memory_map(unpacked)).read_all()
    finally:
        Path(unpacked).unlink()
    where = str(paths[0] if len(paths) == 1 else paths[0].parent)
    return ArrowRows(table, where=where, digest=combined_digest(_file_digest(p) for p in paths))


def from_disk(directory: Path, split: str) -> RowSource:
    """A data set written by ``save_to_disk``; of several splits, ``split``."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(directory))
    except Exception as error:
        raise DataError(f"{directory}: cannot be loaded: {_line(error)}") from None
    if isinstance(loaded, dict):
        if split not in loaded:
            there = ", ".join(map(str, loaded))
            raise DataError(f"{directory}: no split {split!r}; splits there: {there}")
        loaded = loaded[split]
    return HubRows(loaded, str(directory))


def from_hub(path: str, name: str | None, split: str) -> RowSource:
    """A data set by its hub name, from the local cache or the network."""
    # The library retries for half a minute before it believes that there is no network. Where the
    # hub's name does not even resolve, only the local cache can answer, and it can at once.
    offline = not _hub_resolves()
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import datasets
    finally:
        if offline:
            del os.environ["HF_HUB_OFFLINE"]

    try:
        loaded = datasets.load_dataset(path, name, split=split)
    except Exception as error:
        # The library raises a dozen kinds: no network, no such name, gated, bad split.
        raise DataError(
            f"{path}: neither a file or directory here nor a data set that the Hugging Face hub"
            f" gives us: {_line(error)}"
        ) from None
    return HubRows(loaded, path if name is None else f"{path} ({name})")


def _hub_resolves() -> bool:
    """Whether there is a way to the hub: its name resolves, or someone has set how to get there."""
    if any(os.environ.get(name) for name in _HUB_ROUTES):
        return True
    try:
        socket.getaddrinfo("huggingface.co", 443)
    except OSError:
        return False
    return True


def _file_digest(path: Path) -> str:
    """Over the whole of a small file; over its size and evenly spaced blocks of a large one.

    The blocks include the end, where Parquet keeps the counts, offsets and statistics of every
    column chunk, so a changed file of equal size is still told apart.
    """
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_FILE_BYTES:
            while block := file.read(SAMPLE_BYTES):
                digest.update(block)
        else:
            digest.update(str(size).encode())
            for sample in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _plain_row(row: dict[str, Any]) -> Row:
    return {str(name): _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it: times as ISO text, bytes as base64, NaN and infinity as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    return str(value)


def _line(error: BaseException) -> str:
    """First line of an error's message."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
