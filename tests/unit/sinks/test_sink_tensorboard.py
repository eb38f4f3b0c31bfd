"""TensorBoard reads the curves, and no leader writes a point that another has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.sinks.base import key_of
from paceline.sinks.point_reader import PointReader
from paceline.sinks.tensorboard import TensorBoardSink
from paceline.sinks.tensorboard_writer import last_place
from tests.fixtures.run_points import RunPoints, external_run


def read_as_tensorboard_does(directory: Path) -> list[tuple[str, int, float]]:
    """(tag, step, value) of every event file, in order, checksums checked."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    found = []
    for path in sorted(directory.glob("*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            assert int.from_bytes(data[8:12], "little") == masked(data[:8])
            record, crc = data[12 : 12 + length], data[12 + length : 16 + length]
            assert int.from_bytes(crc, "little") == masked(record)
            event = Event.FromString(record)
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            data = data[16 + length :]
    return found


def rewards(directory: Path) -> list[tuple[int, float]]:
    return [
        (step, round(value, 4))
        for tag, step, value in read_as_tensorboard_does(directory / "tensorboard")
        if tag == "train/reward_mean"
    ]


def test_tensorboard_reads_the_curves(tmp_path: Path) -> None:
    run = RunPoints(tmp_path)
    run.write(3)
    sink = TensorBoardSink(external_run(tmp_path))
    assert sink.open() is None
    sink.write(PointReader(run.path, None).read(100))
    sink.close("finished")
    found = read_as_tensorboard_does(tmp_path / "tensorboard")
    assert ("train/reward_mean", 2, pytest.approx(0.02)) in found
    assert ("time/wait_s", 1, 0.5) in found and ("eval/reward_mean", 2, 0.75) in found


@pytest.mark.parametrize("torn", [0, 1, 9, 30])
def test_each_leader_goes_on_after_the_last_whole_point(tmp_path: Path, torn: int) -> None:
    run = RunPoints(tmp_path)
    run.write(5)
    points = PointReader(run.path, None).read(100)
    first = TensorBoardSink(external_run(tmp_path))
    first.open()
    first.write(points[:3])
    (path,) = (tmp_path / "tensorboard").iterdir()
    whole = len(path.read_bytes())
    first.write(points[3:4])
    assert last_place(tmp_path / "tensorboard") == points[3].place
    if torn:
        path.write_bytes(path.read_bytes()[: whole + torn])
        assert last_place(tmp_path / "tensorboard") == points[2].place
        path.write_bytes(path.read_bytes()[:whole])
    second = TensorBoardSink(external_run(tmp_path))
    place = second.open()
    second.write([p for p in points if place is None or p.key > key_of(place)])
    assert rewards(tmp_path) == [(step, step / 100) for step in range(1, 6)]
