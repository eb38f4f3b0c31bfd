"""End of a run: the export of its newest checkpoint, the replayed journal, and summary.json."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.observe.projection import Projection
from paceline.process.user_code import python_module
from paceline_launcher.launch.child import Child, ChildSpec

EXPORT_LIMIT_S = 1800.0


async def export_newest(
    config: Config,
    run_dir: Path,
    note: Callable[[str], None],
    give_up: asyncio.Future[None] | None = None,
) -> Path | None:
    """The Hugging Face directory, written by a process of its own: this one must not import torch.
    None if there is no checkpoint, or it failed, or took EXPORT_LIMIT_S, or ``give_up`` was
    done."""
    checkpoints = Projection.read(run_dir).history.checkpoints
    if not checkpoints:
        note("no checkpoint to export")
        return None
    checkpoint, out = checkpoints[-1].path, run_dir / "export"
    note(f"exporting {checkpoint}")
    trust = ["--trust-remote-code"] if config.model.trust_remote_code else []
    command = (*python_module("paceline_launcher"), "export", checkpoint, "--out", str(out), *trust)
    log = _export_log(run_dir)
    child = await Child.start(ChildSpec("export", "export", command, os.environ, log))
    ended = asyncio.create_task(child.wait())
    ends: list[asyncio.Future[Any]] = [ended] if give_up is None else [ended, give_up]
    try:
        await asyncio.wait(ends, timeout=EXPORT_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not ended.done():
            child.kill()
    return out if await ended == 0 else None


def after_export(run_dir: Path, status: str, reason: str, export: Path | None) -> tuple[str, str]:
    """(status, reason) of a run: one that has finished has failed if there is no export of it."""
    if status == "finished" and export is None:
        return "failed", f"the final export failed: see {_export_log(run_dir)}"
    return status, reason


def replay(redis_url: str, run_id: str) -> dict[str, Any]:
    """``counts``, ``problems`` and ``faults`` of the replayed journal, for the summary; empty if it
    cannot be read. Blocks."""
    from controller.store.journal_audit import verify

    try:
        report = verify(redis_url, run_id)
    except Exception:  # the summary must not fail with the accounting
        return {}
    return {name: getattr(report, name) for name in ("counts", "problems", "faults")}


def _export_log(run_dir: Path) -> Path:
    return run_dir / "logs" / "export.log"
