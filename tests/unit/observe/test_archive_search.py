"""Text search in the sample archive: what is found, and that a file is read once for a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.observe import archive_search, sample_archive
from paceline.observe.archive_search import ArchiveSearch
from paceline.observe.sample_archive import ArchiveWriter


def row(group_id: str, step: int, prompt: str, *texts: str, **values: Any) -> dict[str, Any]:
    completions = [{"text": text, "finish_reason": "stop"} for text in texts]
    facts = {"group_id": group_id, "attempt": 1, "step": step, "state": "trained", **values}
    return {**facts, "prompt": prompt, "completions": json.dumps(completions)}


def test_a_text_is_found_in_prompts_and_completions_in_upper_and_lower_case(tmp_path: Path) -> None:
    rows = [
        row("t0", 1, "Name a river", "I cannot", "the Rhine"),
        row("t1", 1, "I CANNOT see", "why"),
        row("t2", 1, 'quoted "so"', "two\nlines \\ a backslash"),
        row("t3", 1, "Übung", "GRÜSSE"),
        {"group_id": "t4", "attempt": 2, "step": 1, "state": "dropped", "prompt": None},
    ]
    ArchiveWriter(tmp_path, 1, 1 << 30).write(rows)
    search = ArchiveSearch(tmp_path)
    for text, groups in (
        ("i cannot", {"t0", "t1"}),
        ("RHINE", {"t0"}),
        ('"So"', {"t2"}),
        ("two\nlines \\", {"t2"}),
        ("übung", {"t3"}),
        ("grüße", {"t3"}),
        # Names and other values of the stored JSON are no text of a sample.
        ("finish_reason", set()),
        ("stop", set()),
        (".", set()),
    ):
        assert {group for group, _ in search.groups_with(text)} == groups, text


def test_a_repeated_question_reads_new_files_alone_and_a_deleted_file_is_no_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_archive, "_SMALL_BYTES", 0)
    read: list[str] = []
    really = archive_search._search

    def seen(path: Path, text: str) -> Any:
        read.append(path.name)
        return really(path, text)

    monkeypatch.setattr(archive_search, "_search", seen)
    writer = ArchiveWriter(tmp_path, 1, 1 << 30)
    first = writer.write([row("t0", 1, "same")])
    search = ArchiveSearch(tmp_path)
    assert search.groups_with("same") == search.groups_with("SAME") == {("t0", 1)}
    second = writer.write([row("t1", 2, "same")])
    assert search.groups_with("same") == {("t0", 1), ("t1", 1)}
    assert read == [first.name, second.name]
    first.unlink()
    assert search.groups_with("same") == {("t1", 1)}
