"""Sample archive: files within a size limit, each group once, and the lineage of a prompt."""

import errno
import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from paceline.observe import samples
from paceline.observe.groups import Filter, Group, listed
from paceline.observe.samples import ArchiveReader, ArchiveWriter, archived_steps


def row(group_id: str, step: int, attempt: int = 1, **values: Any) -> dict[str, Any]:
    return {"group_id": group_id, "attempt": attempt, "step": step, "state": "trained", **values}


def content(text: str) -> dict[str, Any]:
    return {
        "prompt": "1+1=",
        "generate_s": 1.5,
        "completions": json.dumps([{"text": text, "reward": 1.0}]),
    }


def noise(length: int, seed: int) -> str:
    """Text that cannot be compressed much."""
    return "".join(random.Random(seed).choices(string.printable, k=length))


def test_groups_come_back_as_they_were_written(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path, 3, 1 << 30)
    writer.write([row("t0", 1, dataset_row=7, epoch=0, reward_mean=0.5, **content("2"))])
    writer.write([row("t9", 2, dataset_row=7, epoch=1), row("t8", 2, dataset_row=6)])
    reader = ArchiveReader(tmp_path)
    of_row = [(g.group_id, g.epoch) for g in reader.groups() if g.dataset_row == 7]
    assert of_row == [("t0", 0), ("t9", 1)]
    found = reader.group("t0")
    assert found is not None and found["prompt"] == "1+1=" and found["reward_mean"] == 0.5
    assert found["generate_s"] == 1.5
    assert found["completions"] == [{"text": "2", "reward": 1.0}]
    facts_only = reader.group("t9")
    assert facts_only is not None and facts_only["completions"] == []
    # What is not known is no zero.
    whole = TypeAdapter(Group).validate_python(facts_only)
    assert (whole.generate_s, whole.reward_mean, whole.owner, whole.min_version) == (None,) * 4
    unknown, known = reader.groups()[1], reader.groups()[0]
    assert (unknown.tokens, unknown.reward_mean, known.reward_mean) == (None, None, 0.5)
    best = listed(reader.groups(), Filter(), "reward", 3).groups
    assert best[0] is known and not listed([unknown], Filter(min_reward=-1.0), "reward", 3).total
    assert reader.group("t77") is None
    assert archived_steps(tmp_path) == {1, 2}


def test_a_group_that_two_leaders_wrote_is_read_once_and_attempts_are_told_apart(
    tmp_path: Path,
) -> None:
    """The first of two leaders may be late: the one of the later term counts."""
    ArchiveWriter(tmp_path, 5, 1 << 30).write([row("t0", 1, owner="new"), row("t1", 1, attempt=2)])
    ArchiveWriter(tmp_path, 4, 1 << 30).write([row("t0", 1, owner="old"), row("t1", 1, attempt=1)])
    groups = ArchiveReader(tmp_path).groups()
    assert [g.owner for g in groups if g.group_id == "t0"] == ["new"]
    assert sorted(g.attempt for g in groups if g.group_id == "t1") == [1, 2]


def test_the_oldest_files_go_when_the_limit_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "_SMALL_BYTES", 0)
    writer = ArchiveWriter(tmp_path, 1, 300_000)
    for step in range(1, 11):
        writer.write([row(f"t{step}", step, **content(noise(50_000, step)))])
    sizes = [path.stat().st_size for path in (tmp_path / "samples").iterdir()]
    assert sum(sizes) <= 300_000
    kept = [g.group_id for g in ArchiveReader(tmp_path).groups()]
    assert kept == [f"t{step}" for step in range(11 - len(sizes), 11)] and len(kept) >= 5


def test_small_files_of_a_term_become_one(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path, 1, 1 << 30)
    for step in range(1, 31):
        writer.write([row(f"t{step}", step)])
    assert [p.name for p in (tmp_path / "samples").iterdir()] == ["00000001-00000030-1.30.parquet"]
    assert len(ArchiveReader(tmp_path).groups()) == 30


def test_a_damaged_file_and_files_of_others_cost_nothing_else(tmp_path: Path) -> None:
    ArchiveWriter(tmp_path, 1, 1 << 30).write([row("t0", 1)])
    (tmp_path / "samples" / "00000002-00000002-1.parquet").write_bytes(b"PAR1")
    (tmp_path / "samples" / "mine.parquet").write_bytes(b"")
    (tmp_path / "samples" / "notes.txt").write_text("x")
    assert [g.group_id for g in ArchiveReader(tmp_path).groups()] == ["t0"]


@pytest.mark.parametrize("small_bytes", [0, 1 << 20], ids=["two files", "one file"])
def test_a_group_dropped_after_a_rollback_is_not_shown_as_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    monkeypatch.setattr(samples, "_SMALL_BYTES", small_bytes)
    writer = ArchiveWriter(tmp_path, 1, 1 << 30)
    writer.write([row("t1", 12), row("t2", 13)])
    writer.write([row("t2", 10, state="dropped", reason="stale")])
    assert {g.group_id: g.state for g in ArchiveReader(tmp_path).groups()} == {
        "t1": "trained",
        "t2": "dropped",
    }
    newest = ArchiveReader(tmp_path).group("t2")
    assert newest is not None and newest["state"] == "dropped"


def test_a_step_with_dropped_groups_alone_is_not_archived_yet(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path, 1, 1 << 30)
    writer.write([row("t5", 5, state="dropped")])
    assert archived_steps(tmp_path) == set()
    writer.write([row("t9", 9, state="dropped"), row("t4", 4), row("t3", 3)])
    assert archived_steps(tmp_path) == {3, 4}


def test_what_a_killed_leader_left_half_written_is_removed_once_nobody_writes_it(
    tmp_path: Path,
) -> None:
    left, mine = tmp_path / "samples" / "00000002-00000002-1.2.part", "draft.part"
    left.parent.mkdir()
    left.write_bytes(b"PAR1")
    left.with_name(mine).touch()
    written = left.stat().st_mtime
    # The leader before this one may have a file in hand for a moment.
    ArchiveWriter(tmp_path, 2, 1 << 30, clock=lambda: written + 10.0)
    assert left.exists()
    ArchiveWriter(tmp_path, 2, 1 << 30, clock=lambda: written + 600.0)
    assert [p.name for p in left.parent.iterdir()] == [mine]


def test_a_disk_that_refuses_keeps_nobody_from_leading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "samples" / "00000002-00000002-1.2.part"
    left.parent.mkdir()
    left.touch()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    ArchiveWriter(tmp_path, 2, 1 << 30, clock=lambda: left.stat().st_mtime + 600.0)
    assert left.exists()


def searched(group_id: str, step: int, prompt: str, *texts: str, **values: Any) -> dict[str, Any]:
    completions = [{"text": text, "finish_reason": "stop"} for text in texts]
    meta = {"group_id": group_id, "attempt": 1, "step": step, "state": "trained", **values}
    return {**meta, "prompt": prompt, "completions": json.dumps(completions)}


def matches(archive: ArchiveReader, text: str) -> set[str]:
    return {group.group_id for group in archive.with_text(archive.groups(), text)}


def test_a_text_is_found_in_prompts_and_completions_in_upper_and_lower_case(tmp_path: Path) -> None:
    rows = [
        searched("t0", 1, "Name a river", "I cannot", "the Rhine"),
        searched("t1", 1, "I CANNOT see", "why"),
        searched("t2", 1, 'quoted "so"', "two\nlines \\ a backslash"),
        searched("t3", 1, "Übung", "GRÜSSE"),
        {"group_id": "t4", "attempt": 2, "step": 1, "state": "dropped", "prompt": None},
    ]
    ArchiveWriter(tmp_path, 1, 1 << 30).write(rows)
    search = ArchiveReader(tmp_path)
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
        assert matches(search, text) == groups, text


def test_a_repeated_question_reads_new_files_alone_and_a_deleted_file_is_no_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "_SMALL_BYTES", 0)
    read: list[str] = []
    really = samples._read

    def seen(path: Path, *arguments: Any) -> Any:
        read.append(path.name)
        return really(path, *arguments)

    monkeypatch.setattr(samples, "_read", seen)
    writer = ArchiveWriter(tmp_path, 1, 1 << 30)
    first = writer.write([searched("t0", 1, "same")])
    search = ArchiveReader(tmp_path)
    search.groups()
    read.clear()
    assert matches(search, "same") == matches(search, "SAME") == {"t0"}
    second = writer.write([searched("t1", 2, "same")])
    assert matches(search, "same") == {"t0", "t1"}
    # The metadata of the second file, and once its texts.
    assert read == [first.name, second.name, second.name]
    first.unlink()
    assert matches(search, "same") == {"t1"}


def test_completions_of_earlier_releases_have_the_fields_of_now(tmp_path: Path) -> None:
    old = {"text": "2", "reward": 1.0, "advantage": 0.5}
    ArchiveWriter(tmp_path, 1, 1 << 30).write([row("t0", 1, completions=json.dumps([old]))])
    found = ArchiveReader(tmp_path).group("t0")
    assert found is not None
    assert found["completions"] == [{"text": "2", "reward": 1.0, "relative_reward": 0.5}]
