"""Export of a finished run's newest checkpoint, by a process of its own: this one must not import
torch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.observe.run_records import RunRecords
from paceline.process.user_code import python_module
from paceline_launcher.launch.child import Child, ChildSpec

LIMIT_S = 1800.0


def export_log(run_dir: Path) -> Path:
    return run_dir / "logs" / "export.log"


async def export_newest(
    config: Config,
    run_dir: Path,
    note: Callable[[str], None],
    give_up: asyncio.Future[None] | None = None,
) -> Path | None:
    """The Hugging Face directory; None if there is no checkpoint, or it failed, or took LIMIT_S, or
    ``give_up`` was done."""
    checkpoints = RunRecords.read(run_dir).history.checkpoints
    if not checkpoints:
        note("no checkpoint to export")
        return None
    checkpoint, out = checkpoints[-1].path, run_dir / "export"
    note(f"exporting {checkpoint}")
    trust = ["--trust-remote-code"] if config.model.trust_remote_code else []
    command = (*python_module("paceline_launcher"), "export", checkpoint, "--out", str(out), *trust)
    child = await Child.start(
        ChildSpec("export", "export", command, os.environ, export_log(run_dir))
    )
    ended = asyncio.create_task(child.wait())
    ends: list[asyncio.Future[Any]] = [ended] if give_up is None else [ended, give_up]
    try:
        await asyncio.wait(ends, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not ended.done():
            child.kill()
    return out if await ended == 0 else None
