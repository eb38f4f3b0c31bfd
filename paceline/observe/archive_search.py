"""Text search in the sample archive of a run.

Every file is read once for a text, in batches: 1 GiB of samples takes some seconds and little
memory. Files never change, so a page that repeats its question costs only the files that are new.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from paceline.observe.sample_archive import archive_files

_TEXTS = 4
"""Texts whose matches are remembered: more people rarely search at a time."""
_BATCH_ROWS = 256

Match = tuple[str, int]
"""Group id and attempt."""


class ArchiveSearch:
    """Blocks for as long as the disk takes. Threads may share one."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._found: OrderedDict[str, dict[Path, set[Match]]] = OrderedDict()
        self._searching = threading.Lock()

    def groups_with(self, text: str) -> set[Match]:
        """Groups that have ``text`` in their prompt or in a completion, in upper or lower case."""
        text = text.casefold()
        with self._searching:
            known = self._found.pop(text, {})
            paths = archive_files(self._run_dir)
            matches = {
                path: known[path] if path in known else _search(path, text) for path in paths
            }
            self._found[text] = matches
            if len(self._found) > _TEXTS:
                self._found.popitem(last=False)
        return set().union(*matches.values())


def _search(path: Path, text: str) -> set[Match]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = ["group_id", "attempt", "prompt", "completions"]
    found: set[Match] = set()
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                for row in _candidates(batch, text):
                    if any(text in one.casefold() for one in _texts(row)):
                        found.add((row["group_id"], row["attempt"]))
    except (FileNotFoundError, pa.ArrowInvalid):
        # Deleted meanwhile because of the size limit, or damaged by a full disk.
        pass
    return found


def _candidates(batch: Any, text: str) -> list[dict[str, Any]]:
    """Rows that may have the text: most are ruled out without decoding their JSON."""
    import pyarrow.compute as pc

    # In other letters upper and lower case differ in their JSON escapes.
    if text.isascii():
        escaped = json.dumps(text)[1:-1]
        batch = batch.filter(
            pc.or_kleene(
                pc.match_substring(batch.column("prompt"), text, ignore_case=True),
                pc.match_substring(batch.column("completions"), escaped, ignore_case=True),
            )
        )
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def _texts(row: dict[str, Any]) -> list[str]:
    completions = json.loads(row["completions"] or "[]")
    return [row["prompt"] or "", *(str(completion.get("text", "")) for completion in completions)]
