"""Run files that cannot be written cost the run its files, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

from controller.export.run_files import RunFiles


async def test_files_that_cannot_be_opened_do_not_fill_the_memory(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()  # in the way
    files = RunFiles(tmp_path, may_write=lambda: True)
    files.record("1-0", 1.0, [{"type": "RunStarted"}])
    async with asyncio.timeout(10):
        assert await files.opened() is None
    for number in range(100):
        files.record(f"{number}-0", 1.0, [{"type": "TermBegun"}])
    assert len(files._items) == 0
    assert await files.written(), "nothing is left to write"
    files.close()
