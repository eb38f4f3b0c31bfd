"""Sample archive: the groups of a run as Parquet files in ``<run_dir>/samples``.

One row a group: what the ledger knew of it, and, of as many groups as the size limits allow, its
prompt and completions. A file holds whole steps, is written once and never changed; its name is
``FIRST_STEP-LAST_STEP-TERM.NUMBER.parquet``, of its trained groups (0 if it has none), and the
leader of a term numbers what it writes. A step may be in several files (it was trained again after
a rollback, or two leaders wrote it): the reader keeps the newest row of each (group_id, attempt).

A row has about 100 bytes without completions, so the metadata of 10 million groups fit in 1 GiB.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from paceline.observe.groups import GroupSummary

FOLDER = "samples"
_COLUMNS = {
    name: {int: "int64", float: "float64"}.get(next(iter(get_args(kind)), kind), "string")
    for name, kind in get_type_hints(GroupSummary).items()
    if name not in ("detail", "lengths", "dropped_t")
} | {"t": "float64"}
"""Metadata of a group and their Arrow types; ``t``, in Unix seconds, is for other readers."""
_SMALL_BYTES = 4 << 20
"""A smaller file is merged with the next one: a directory of very many files would be slow to read.
"""
_NAME = re.compile(r"(\d+)-\d+-(\d+)(?:\.(\d+))?\.parquet")
_PART = re.compile(r"\d+-\d+-\d+\.\d+\.part")
_SEARCHES = 4096  # answers that are remembered, each of one file for one text
LEFT_S = 300.0  # nobody writes any more on such a file that has not grown for so long
_CONTENT = ("prompt", "completions")
"""Null if only the metadata are kept. ``completions``: the JSON text of an array of objects."""
_TIMES = ("generate_s", "reward_s")  # Null as well


class ArchiveWriter:
    """Writes the files of one leader's term. Raises OSError if the disk fails."""

    def __init__(
        self, run_dir: Path, term: int, max_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        """``clock``: Unix seconds, as in the times of files."""
        self._run_dir = run_dir
        self._directory = run_dir / FOLDER
        self._term = term
        self._max_bytes = max_bytes
        self._written = 0
        self._newest: Path | None = None
        """File of this term to which rows are added as long as it is small."""
        self._newest_bytes = 0  # Uncompressed
        # What leaders that died left half written; the one before may still be writing. A disk that
        # refuses stops no leader.
        with contextlib.suppress(OSError):
            for path in self._directory.glob("*.part"):
                if _PART.fullmatch(path.name) and path.stat().st_mtime < clock() - LEFT_S:
                    path.unlink(missing_ok=True)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> Path:
        """A new file with ``rows`` (at least one), of whole steps. Afterwards the oldest files are
        deleted until all together are within the limit."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._directory.mkdir(parents=True, exist_ok=True)
        types = _COLUMNS | dict.fromkeys(_CONTENT, "string") | dict.fromkeys(_TIMES, "float64")
        schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in types.items()])
        table = pa.Table.from_pylist(
            [{name: row.get(name) for name in types} for row in rows], schema=schema
        )
        merged = self._newest
        # By its text: a file of short answers may hold a hundred times its size.
        if merged is not None and self._newest_bytes < _SMALL_BYTES:
            table = pa.concat_tables([pq.read_table(merged, partitioning=None), table])
        else:
            merged = None
        self._written += 1
        columns = (table.column(name).to_pylist() for name in ("step", "state"))
        steps = [step for step, state in zip(*columns, strict=True) if state != "dropped"]
        span = f"{min(steps, default=0):08d}-{max(steps, default=0):08d}"
        path = self._directory / f"{span}-{self._term}.{self._written}.parquet"
        partial = path.with_suffix(".part")
        pq.write_table(table, partial, compression="zstd")
        # Atomic: a reader never sees an incomplete file, and at most a merged one twice.
        partial.replace(path)
        if merged is not None:
            merged.unlink(missing_ok=True)
        self._newest, self._newest_bytes = path, table.nbytes
        sizes = {kept: kept.stat().st_size for kept in archive_files(self._run_dir)}
        total = sum(sizes.values())
        for oldest, size in sizes.items():
            if total <= self._max_bytes or oldest == path:
                break
            oldest.unlink(missing_ok=True)
            total -= size
        return path


class ArchiveReader:
    """Reads the archive of a run as it grows. Blocks for as long as the disk takes; threads may
    share one. Files never change, so the metadata of each are read once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._meta: dict[Path, list[GroupSummary]] = {}
        self._with_text = lru_cache(_SEARCHES)(_groups_with)
        """A page that repeats its question costs only the files that are new."""

    def groups(
        self, stored: Collection[GroupSummary] = (), *, dropped: bool = True
    ) -> list[GroupSummary]:
        """``stored``, the groups that are still stored whole, and the archived ones beside them,
        each attempt once by its newest row, in the order of writing. ``dropped``: also those that
        were not trained."""
        meta = {}
        for path in archive_files(self._run_dir):
            if (known := self._meta.get(path)) is None:
                names = [name for name in _COLUMNS if name != "t"]
                known = [GroupSummary(**row) for row in _read(path, names)]
            meta[path] = known
        self._meta = meta
        archived = {group.key: group for groups in meta.values() for group in groups}
        there = {group.key for group in stored}
        others = (group for key, group in archived.items() if key not in there)
        return [*stored, *(group for group in others if dropped or group.state != "dropped")]

    def group(self, group_id: str) -> dict[str, Any] | None:
        """The fields of a ``Group``: the newest archived attempt; None if there is none. Without
        content there is no prompt and no completion."""
        import pyarrow.compute as pc

        for path in reversed(archive_files(self._run_dir)):
            rows = _read(path, [*_COLUMNS, *_CONTENT, *_TIMES], pc.field("group_id") == group_id)
            if rows:
                # Among rows of the same attempt the one that was written last.
                row = max(reversed(rows), key=lambda row: row["attempt"])
                completions = json.loads(row.get("completions", "[]"))
                for completion in completions:
                    if "advantage" in completion:  # its name in earlier releases
                        completion["relative_reward"] = completion.pop("advantage")
                return {**row, "completions": completions}
        return None

    def with_text(self, found: Iterable[GroupSummary], text: str) -> list[GroupSummary]:
        """The groups of ``found`` that have ``text`` in their archived prompt or in a completion,
        in upper or lower case."""
        paths, text = archive_files(self._run_dir), text.casefold()
        matches = set().union(*(self._with_text(path, text) for path in paths))
        return [group for group in found if group.key in matches]


def _groups_with(path: Path, text: str) -> frozenset[tuple[str, int]]:
    import pyarrow.compute as pc

    def texts(row: Mapping[str, Any]) -> Iterator[str]:
        yield row.get("prompt", "")
        yield from (str(c.get("text", "")) for c in json.loads(row.get("completions", "[]")))

    wanted = None
    # Most rows are ruled out without decoding their JSON. Other letters differ in its escapes.
    if text.isascii():
        in_prompt = pc.match_substring(pc.field("prompt"), text, ignore_case=True)
        escaped = json.dumps(text)[1:-1]
        wanted = in_prompt | pc.match_substring(pc.field("completions"), escaped, ignore_case=True)
    rows = _read(path, ["group_id", "attempt", *_CONTENT], wanted)
    return frozenset(
        (row["group_id"], row["attempt"])
        for row in rows
        if any(text in found.casefold() for found in texts(row))
    )


def _read(path: Path, columns: list[str], wanted: Any = None) -> list[dict[str, Any]]:
    """Rows without what was not known of them, for which earlier releases wrote -1."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    try:
        file = ds.dataset(path, format="parquet")
        # A file of an earlier release has fewer.
        there = [name for name in columns if name in file.schema.names]
        table = file.to_table(columns=there, filter=wanted)
    except (FileNotFoundError, pa.ArrowInvalid):
        # Deleted meanwhile because of the size limit, or damaged by a full disk.
        return []
    return [
        {
            name: value
            for name, value in row.items()
            if value is not None and not (isinstance(value, int) and value < 0)
        }
        for row in table.to_pylist()
    ]


def archived_steps(run_dir: Path) -> set[int]:
    """Steps whose trained groups are in files, by their names: a new leader must not wait."""
    found: set[int] = set()
    for path in archive_files(run_dir):
        first, last, *_ = path.stem.split("-")
        found.update(range(int(first), int(last) + 1))
    return found - {0}


def archive_files(run_dir: Path) -> list[Path]:
    """Files by term, so that what a later leader wrote counts as newer, then in the order of
    writing."""
    found = []
    for path in (run_dir / FOLDER).glob("*.parquet"):
        if match := _NAME.fullmatch(path.name):
            first, term, number = (int(part or 1) for part in match.groups())
            found.append((term, number, first, path))
    return [path for *_, path in sorted(found)]
