"""Payload files count once they, and their names, would outlive a power cut."""

import os
import stat
from pathlib import Path

import pytest

from paceline.payloads.file_payloads import FilePayloads


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
