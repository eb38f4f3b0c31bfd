"""Real Weights & Biases in its offline mode: what is in its files is what would be uploaded."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="wandb is not installed: pip install 'paceline[wandb]'")

from paceline.sinks.base import key_of
from paceline.sinks.point_reader import PointReader
from paceline.sinks.wandb import WandbSink, last_offline_place, records
from tests.fixtures.run_points import RunPoints, external_run

ROOT = Path(__file__).resolve().parents[3]


def rows(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(run id, row) of every offline file, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted((directory / "wandb").glob("offline-run-*/*.wandb")):
        run_id = ""
        for data in records(path):
            record = Record.FromString(data)
            run_id = record.run.run_id or run_id
            if record.history.item:
                row = {
                    ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                yield run_id, row


def numbers_of(directory: Path, curve: str) -> list[int]:
    return [row["step"] for _, row in rows(directory) if curve in row]


def lead(run: RunPoints, directory: Path, outcome: str | None) -> int:
    """One leader's time with the sink; how many points it had to send."""
    sink = WandbSink(external_run(directory, wandb_mode="offline"))
    place = sink.open()
    points = PointReader(run.path, key_of(place) if place else None).read(1000)
    if points:
        sink.write(points)
    sink.close(outcome)
    return len(points)


def test_each_leader_adds_its_part_to_one_run_and_no_step_is_there_twice(tmp_path: Path) -> None:
    run = RunPoints(tmp_path)
    run.write(3)
    assert lead(run, tmp_path, None) == 4
    run.write(4)
    assert lead(run, tmp_path, "finished") == 5
    assert lead(run, tmp_path, "finished") == 0
    found = list(rows(tmp_path))
    assert {run_id for run_id, _ in found} == {"paceline-0123456789abcdef"}
    assert numbers_of(tmp_path, "train/reward_mean") == list(range(1, 8))
    assert numbers_of(tmp_path, "eval/reward_mean") == [2, 5]
    numbers = [row["_step"] for _, row in found]
    assert numbers == sorted(set(numbers))


KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.sinks.point_reader import PointReader
from paceline.sinks.wandb import WandbSink
from tests.fixtures.run_points import external_run
directory = Path(sys.argv[1])
sink = WandbSink(external_run(directory, wandb_mode="offline"))
sink.open()
sink.write(PointReader(directory / "metrics.jsonl", None).read(1000))
os.killpg(os.getpgid(0), signal.SIGKILL)
"""


def test_what_a_killed_leader_had_handed_over_and_w_and_b_had_not_written_is_sent_again(
    tmp_path: Path,
) -> None:
    run = RunPoints(tmp_path)
    run.write(3)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        start_new_session=True,
        capture_output=True,
        cwd=ROOT,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    there = len(list(rows(tmp_path)))
    assert lead(run, tmp_path, "finished") == len(run.expected) - there
    assert numbers_of(tmp_path, "train/reward_mean") == [1, 2, 3]


def test_offline_files_of_another_run_and_torn_ones_are_not_taken_for_ones_own(
    tmp_path: Path,
) -> None:
    run = RunPoints(tmp_path)
    run.write(2)
    lead(run, tmp_path, None)
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    run_id = "paceline-0123456789abcdef"
    assert last_offline_place(tmp_path / "wandb", "paceline-other") is None
    whole = path.read_bytes()
    path.write_bytes(whole[:7])
    assert last_offline_place(tmp_path / "wandb", run_id) is None
    places = set()
    for end in range(7, len(whole) + 1, 13):
        path.write_bytes(whole[:end])
        places.add(last_offline_place(tmp_path / "wandb", run_id))
    points = PointReader(run.path, None).read(10)
    assert places == {None, *(point.place for point in points)}
