"""The run files: complete after every handover, never a line twice."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.event_history import position_key
from paceline.observe.run_files import RunFileWriter
from tests.unit.rest.test_recorded_journals import entries_of

FILES = ("events.jsonl", "metrics.jsonl")
Record = tuple[str, float, dict[str, Any]]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """A run's events, several to a journal position, as the leader hands them over."""
    entries = entries_of("34")
    return [(x.at.entry, x.t, dict(record)) for x in entries for record in x.records]


def replay(writer: RunFileWriter, records: Sequence[Record]) -> None:
    """Hands over every record whose position comes after ``last_position``."""
    after = writer.last_position
    for position, t, event in records:
        if after is None or position_key(position) > position_key(after):
            writer.record(position, t, event)


def contents(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in FILES}


def test_a_new_leader_continues_the_files_without_gap_or_repeat(
    records: list[Record], tmp_path: Path
) -> None:
    whole = RunFileWriter(tmp_path / "whole")
    replay(whole, records)
    whole.close()
    for cut in range(0, len(records), 9):
        split = tmp_path / str(cut)
        replay(RunFileWriter(split), records[:cut])
        second = RunFileWriter(split)
        replay(second, records)
        second.close()
        assert contents(split) == contents(tmp_path / "whole"), cut


def test_a_torn_last_line_is_written_again_whole(records: list[Record], tmp_path: Path) -> None:
    writer = RunFileWriter(tmp_path)
    replay(writer, records)
    writer.close()
    whole = contents(tmp_path)
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data[:-7])
    again = RunFileWriter(tmp_path)
    replay(again, records)
    again.close()
    assert contents(tmp_path) == whole


def test_a_deposed_leader_that_wakes_up_writes_nothing(
    records: list[Record], tmp_path: Path
) -> None:
    deposed = RunFileWriter(tmp_path)
    replay(deposed, records[:60])
    replay(RunFileWriter(tmp_path), records)
    before = contents(tmp_path)
    for record in records[60:]:
        deposed.record(*record)
    assert contents(tmp_path) == before


def test_what_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    writer = RunFileWriter(tmp_path)
    head = {"type": "StepCommitted", "step": 1, "version": 1, "severity": "info", "text": "words"}
    writer.record("1-0", 1.0, {**head, "metrics": {"reward_mean": 0.1, "loss": float("nan")}})
    writer.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["kind"], row["reward_mean"], row["loss"]) == ("step", 0.1, None)
