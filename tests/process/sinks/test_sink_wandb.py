"""Real Weights & Biases in its offline mode: what is in its files is what would be uploaded."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="wandb is not installed: pip install 'paceline[wandb]'")


from paceline.observe.sinks.wandb import WandbSink
from tests.fixtures.run_points import RunPoints, external_run, points_of

ROOT = Path(__file__).resolve().parents[3]

BLOCK = 32768
HEAD = 7
WHOLE, LAST_PART = 1, 4


def records(path: Path) -> Iterator[bytes]:
    """The complete records of an offline file: LevelDB's log format behind a head of 7 bytes."""
    data = path.read_bytes()
    at, parts = HEAD, b""
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += HEAD + length
        if kind == 0 or at > len(data):
            return
        parts += data[at - length : at]
        if kind in (WHOLE, LAST_PART):
            yield parts
            parts = b""


def rows(directory: Path) -> list[tuple[str, dict[str, Any]]]:
    """(run id, row) of the newest offline file."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    (*_, path) = sorted((directory / "wandb").glob("offline-run-*/*.wandb"))
    run_id = ""
    for data in records(path):
        record = Record.FromString(data)
        run_id = record.run.run_id or run_id
        if record.history.item:
            row = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            found.append((run_id, row))
    return found


def steps_of(directory: Path, curve: str) -> list[int]:
    return [row["step"] for _, row in rows(directory) if curve in row]


@pytest.fixture(autouse=True)
def offline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "online" not in request.node.name:
        monkeypatch.setenv("WANDB_MODE", "offline")


def lead(run: RunPoints, directory: Path, outcome: str | None) -> None:
    """One leader's time with the sink."""
    sink = WandbSink(external_run(directory))
    sink.write(points_of(run.path, sink.open()))
    sink.close(outcome)


def test_the_newest_offline_run_has_the_whole_curve_and_no_step_twice(tmp_path: Path) -> None:
    run = RunPoints(tmp_path)
    run.write(3)
    lead(run, tmp_path, None)
    run.write(4)
    lead(run, tmp_path, "finished")
    found = rows(tmp_path)
    assert {run_id for run_id, _ in found} == {"paceline-0123456789abcdef"}
    assert steps_of(tmp_path, "train/reward_mean") == list(range(1, 8))
    assert steps_of(tmp_path, "eval/reward_mean") == [2, 5]
    numbers = [row["_step"] for _, row in found]
    assert numbers == sorted(set(numbers))


class Service:
    """Stands in for the W&B library, connected to a service that has points up to step 128."""

    starting_step = 129
    Settings = dict
    logged: list[int]

    def init(self, **options: Any) -> Service:
        assert options["resume"] == "allow" and options["id"] == "paceline-0123456789abcdef"
        self.logged = []
        return self

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def log(self, row: dict[str, Any], *, step: int, commit: bool) -> None:
        self.logged.append(step)


def test_online_the_next_leader_continues_after_the_services_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    run = RunPoints(tmp_path)
    run.write(4)
    points = points_of(run.path, None)[:10]
    assert points[0].number == 128
    sink = WandbSink(external_run(tmp_path))
    sink.write(points_of(run.path, sink.open())[:10])
    assert service.logged == [point.number for point in points[1:]]


KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.observe.run_files import read_lines
from paceline.observe.sinks.base import Points
from paceline.observe.sinks.wandb import WandbSink
from tests.fixtures.run_points import external_run, points_of
directory = Path(sys.argv[1])
sink = WandbSink(external_run(directory))
sink.open()
sink.write(list(Points(None).of(read_lines(directory / "metrics.jsonl"))))
os.killpg(os.getpgid(0), signal.SIGKILL)
"""


def test_points_that_a_killed_leader_handed_over_unwritten_are_in_the_next_offline_run(
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
    lead(run, tmp_path, "finished")
    assert steps_of(tmp_path, "train/reward_mean") == [1, 2, 3]
