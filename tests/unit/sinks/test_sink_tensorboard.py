"""TensorBoard reads the curves, and the next leader continues after the last point."""

from dataclasses import replace
from pathlib import Path

from paceline.observe.sinks.tensorboard import TensorBoardSink
from tests.fixtures.run_points import RunPoints, external_run, points_of


def read_as_tensorboard_does(directory: Path) -> list[tuple[str, int, float]]:
    """(tag, step, value) of every event file, in order, checksums checked."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    found = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
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


def test_tensorboard_reads_the_curves_which_each_leader_continues_after_the_last_point(
    tmp_path: Path,
) -> None:
    run = RunPoints(tmp_path)
    run.write(5)
    points = points_of(run.path, None)
    first = TensorBoardSink(external_run(tmp_path))
    assert first.open() is None
    first.write(points[:3])
    second = TensorBoardSink(external_run(tmp_path))
    assert second.open() == points[2].number
    second.write(points_of(run.path, second.open()))
    assert rewards(tmp_path) == [(step, step / 100) for step in range(1, 6)]
    found = read_as_tensorboard_does(tmp_path / "tensorboard")
    assert ("time/wait_s", 1, 0.5) in found and ("eval/reward_mean", 2, 0.75) in found


def test_a_leader_killed_while_it_noted_its_last_point_repeats_points_and_loses_none(
    tmp_path: Path,
) -> None:
    run = RunPoints(tmp_path)
    run.write(2)
    first = TensorBoardSink(external_run(tmp_path))
    first.open()
    first.write(points_of(run.path, None))
    (tmp_path / "tensorboard" / "last_point").write_text("")
    second = TensorBoardSink(external_run(tmp_path))
    second.write(points_of(run.path, second.open()))
    assert rewards(tmp_path) == [(1, 0.01), (2, 0.02)] * 2


def test_runs_of_one_name_share_a_directory_of_many_runs_and_no_files(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = RunPoints(tmp_path / "run")
    run.write(2)
    shared = tmp_path / "all"
    for run_id in ("paceline-0000000a", "paceline-0000000b"):
        identity = external_run(tmp_path / "run", tensorboard_dir=str(shared))
        sink = TensorBoardSink(replace(identity, id=run_id))
        assert sink.open() is None
        sink.write(points_of(run.path, None))
        sink.close("finished")
    found = sorted(shared.iterdir())
    assert len(found) == 2 and all(path.name.startswith("arithmetic-") for path in found)
    assert all(read_as_tensorboard_does(path) for path in found)
    assert not (tmp_path / "run" / "tensorboard").exists()
