"""Real Weights & Biases in its offline mode: what is in its files is what would be uploaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="wandb is not installed: pip install 'paceline[wandb]'")

from paceline.sinks.base import key_of
from paceline.sinks.reader import PointReader
from paceline.sinks.wandb import WandbSink
from tests.helpers.run_points import RunPoints, external_run

BLOCK = 32768
HEAD = 7


def records(path: Path) -> Iterator[bytes]:
    """The records of an offline file: a LevelDB log behind a head of seven bytes."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = HEAD, b""
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


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


def test_each_leader_adds_its_part_to_one_run_and_no_step_is_there_twice(tmp_path: Path) -> None:
    run = RunPoints(tmp_path)
    run.write(3)
    for steps in (0, 4):
        run.write(steps)
        sink = WandbSink(external_run(tmp_path, wandb_mode="offline"))
        place = sink.open()
        sink.write(PointReader(run.path, key_of(place) if place else None).read(1000))
        sink.close(None if not steps else "finished")
    found = list(rows(tmp_path))
    assert {run_id for run_id, _ in found} == {"paceline-0123456789abcdef"}
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
    trained = [row["step"] for _, row in found if "train/reward_mean" in row]
    assert trained == list(range(1, 8))
    assert [row["step"] for _, row in found if "eval/reward_mean" in row] == [2, 5]
    numbers = [row["_step"] for _, row in found]
    assert numbers == sorted(set(numbers))


def test_the_place_of_another_run_in_the_directory_is_not_taken_for_ones_own(
    tmp_path: Path,
) -> None:
    run = RunPoints(tmp_path)
    run.write(2)
    place_file = tmp_path / "wandb" / "paceline-place.json"
    place_file.parent.mkdir()
    place_file.write_text(json.dumps({"id": "paceline-other", "place": "9999999-0/0"}))
    sink = WandbSink(external_run(tmp_path, wandb_mode="offline"))
    assert sink.open() is None
    sink.write(PointReader(run.path, None).read(1000))
    sink.close("finished")
    assert json.loads(place_file.read_text())["id"] == "paceline-0123456789abcdef"
