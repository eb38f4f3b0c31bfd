"""Exports of a run that goes on: which checkpoints, and what a failure does to it."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config.schema import Config
from paceline_launcher.launch import exports
from tests.fixtures.event_files import write_events


class Launcher:
    """A launcher whose exports are written at once. ``trouble``: how the next ones end."""

    def __init__(self, run_dir: Path, every: int) -> None:
        settings = {"model": {"path": "m"}, "data": {"path": "d"}, "train": {"export_every": every}}
        self.config = Config.model_validate(settings)
        self.run_dir = run_dir
        self.exported: list[int] = []
        self.notes: list[str] = []
        self.trouble: list[bool | Exception] = []

    async def export(self, config: Config, run_dir: Path, checkpoint: str, out: Path) -> bool:
        self.exported.append(int(out.name.removeprefix("step-")))
        if self.trouble:
            if isinstance(outcome := self.trouble.pop(0), Exception):
                raise outcome
            return outcome
        mark(out, checkpoint)
        return True

    async def goes_on(self) -> list[int]:
        """Steps that are exported until there is nothing more to do."""
        self.exported.clear()
        note: Any = self.notes.append
        task = asyncio.create_task(exports.export_while_it_runs(self.config, self.run_dir, note))
        await asyncio.sleep(0.3)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return self.exported


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def start(every: int) -> Launcher:
        launcher = Launcher(tmp_path, every)
        monkeypatch.setattr(exports, "export_checkpoint", launcher.export)
        monkeypatch.setattr(exports, "POLL_S", 0.01)
        return launcher

    return start


def mark(out: Path, checkpoint: str) -> None:
    out.mkdir(parents=True)
    (out / "paceline.json").write_text(json.dumps({"checkpoint": checkpoint}))


def record(run_dir: Path, *steps: int, line: str = "a") -> None:
    for step in steps:
        path = run_dir / "checkpoints" / f"step-{step}.{line}"
        path.mkdir(parents=True)
        write_events(run_dir, {"type": "CheckpointRecorded", "path": str(path), "step": step})


async def test_every_second_checkpoint_is_exported_once_whoever_launches(launch, tmp_path) -> None:
    record(tmp_path, 10, 20, 30, 40)
    write_events(tmp_path, {"type": "StepCommitted", "step": 41})
    assert await launch(2).goes_on() == [20, 40]
    record(tmp_path, 50, 60)
    assert await launch(2).goes_on() == [60]
    assert (tmp_path / "exports" / "step-000060" / "paceline.json").exists()


async def test_a_run_that_did_not_ask_has_no_exports(launch, tmp_path) -> None:
    record(tmp_path, 10)
    assert await launch(0).goes_on() == []


async def test_what_was_removed_is_left_out_and_a_step_of_another_line_is_new(
    launch, tmp_path
) -> None:
    record(tmp_path, 10, 20)
    (tmp_path / "checkpoints" / "step-10.a").rmdir()
    assert await launch(1).goes_on() == [20]
    record(tmp_path, 20, line="b")  # after a rollback
    launcher = launch(1)
    launcher.trouble = [True]
    assert await launcher.goes_on() == [20]


async def test_an_export_that_fails_is_noted_and_the_next_one_is_tried(launch, tmp_path) -> None:
    record(tmp_path, 10, 20, 30, 40)
    launcher = launch(1)
    launcher.trouble = [
        False,
        OSError(28, "No space left on device"),
        RuntimeError("can't start new thread"),
    ]
    assert await launcher.goes_on() == [10, 20, 30, 40]
    first, second, third, fourth = launcher.notes
    assert first.endswith("step-000010 is not exported: see logs/export.log")
    assert "step-000020 is not exported: " in second and "No space" in second
    assert "limit of processes" in third and fourth.startswith("exported ")
