"""Files of a run and of payloads: whose they are if leaders follow closely, that a disk that fails
costs nothing else, and that payloads count once they would outlive a power cut."""

import asyncio
import os
import stat
from pathlib import Path

import pytest

from controller.export.exporters import RunFiles
from paceline.ids import TaskId
from paceline.observe.run_files import RunFileWriter, read_lines
from paceline.payloads.file_payloads import FilePayloads
from paceline.payloads.store import StoreUnavailable
from testbed.patience import patient


async def test_files_that_cannot_be_opened_do_not_fill_the_memory(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()  # in the way
    files = RunFiles(tmp_path, may_write=lambda: True)
    files.start()
    files.record("1-0", 1.0, [{"type": "RunStarted"}])
    async with asyncio.timeout(patient(10)):
        assert await files.opened() is None
    for number in range(100):
        files.record(f"{number}-0", 1.0, [{"type": "TermBegun"}])
    assert len(files._items) == 0
    assert await files.written(), "nothing is left to write"
    files.close()


ENDED = {"type": "RunFinished", "text": "run finished"}


def positions(directory: Path) -> list[str]:
    return [str(line["position"]) for line in read_lines(directory / "events.jsonl")]


async def test_a_leader_that_never_began_takes_no_files_from_its_successor(tmp_path: Path) -> None:
    """Two controllers deposed each other at the start of a run, and its files stayed empty."""
    successor = RunFiles(tmp_path, may_write=lambda: True)
    successor.start()
    await successor.opened()
    deposed = RunFiles(tmp_path, may_write=lambda: False)
    deposed.close()
    assert not deposed._thread.is_alive()
    successor.record("1-0", 1.0, [ENDED])
    successor.close()
    assert positions(tmp_path) == ["1-0"]


async def test_who_no_longer_waits_for_the_files_ends_nothing(tmp_path: Path) -> None:
    """A leader was deposed while they were opened, and their thread died of it."""
    files = RunFiles(tmp_path, may_write=lambda: True)
    waits = asyncio.create_task(files.opened())
    await asyncio.sleep(0)
    waits.cancel()
    await asyncio.wait([waits])
    files.start()
    files.record("1-0", 1.0, [ENDED])
    files.close()
    assert positions(tmp_path) == ["1-0"]


async def test_files_that_a_deposed_leader_took_are_put_back(tmp_path: Path) -> None:
    """It was stopped in the middle of opening them, and woke up when its successor had opened
    them."""
    leader = RunFiles(tmp_path, may_write=lambda: True)
    leader.start()
    leader.record("1-0", 1.0, [ENDED])
    assert await leader.written(60)
    deposed = RunFileWriter(tmp_path)
    leader.record("2-0", 2.0, [ENDED])
    assert await leader.written(60)
    assert positions(tmp_path) == ["1-0", "2-0"]
    deposed.record("3-0", 3.0, ENDED)
    deposed.close()
    leader.close()
    assert positions(tmp_path) == ["1-0", "2-0"]


async def test_a_deposed_leader_puts_no_files_back(tmp_path: Path) -> None:
    leads = True
    deposed = RunFiles(tmp_path, may_write=lambda: leads)
    deposed.start()
    deposed.record("1-0", 1.0, [ENDED])
    assert await deposed.written(60)
    leads = False
    successor = RunFileWriter(tmp_path)
    successor.record("2-0", 2.0, ENDED)
    deposed.close()
    successor.close()
    assert positions(tmp_path) == ["1-0", "2-0"]


async def test_a_payload_that_cannot_be_looked_for_is_not_missing(tmp_path: Path) -> None:
    ref = TaskId("t1"), 1
    store = FilePayloads(tmp_path / "a::b" / "run")
    await store.put({ref: b"one"})
    assert await store.missing([ref, (TaskId("t2"), 1)]) == [(TaskId("t2"), 1)]
    (tmp_path / "a::b").rename(tmp_path / "c")
    (tmp_path / "a::b").touch()
    with pytest.raises(StoreUnavailable):
        await store.missing([ref])


async def test_payload_files_and_their_directory_are_synced_before_the_event_that_accepts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    sync = os.fsync

    def note(handle: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        synced.append((kind, len(list(tmp_path.glob("run/*.group")))))
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    store = FilePayloads(tmp_path / "run")
    assert synced == [("directory", 0)], "the store's own name"
    await store.put({("t1", 1): b"one", ("t2", 1): b"two"})
    assert [kind for kind, _ in synced[1:]] == ["file", "file", "directory"]
    assert synced[-1][1] == 2, "the directory after all names"
    assert await store.get([("t1", 1), ("t2", 1)]) == [b"one", b"two"]
