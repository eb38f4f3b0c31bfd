"""Exports of checkpoints as Hugging Face directories, each by a process of its own: the launcher
must not import torch."""

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.errors import in_words
from paceline.observe.file_tail import FileTail
from paceline.observe.vocabulary import EventType
from paceline.user_code import python_module
from paceline_launcher.launch.child import Child, ChildSpec

EXPORT_LIMIT_S = 1800.0
EXPORT_LOG = "logs/export.log"
POLL_S = 2.0


async def export_checkpoint(
    config: Config,
    run_dir: Path,
    checkpoint: str,
    out: Path,
    give_up: asyncio.Future[None] | None = None,
) -> bool:
    """False if it failed, or took EXPORT_LIMIT_S, or ``give_up`` was done."""
    trust = ["--trust-remote-code"] if config.model.trust_remote_code else []
    command = (*python_module("paceline_launcher"), "export", checkpoint, "--out", str(out), *trust)
    log = run_dir / EXPORT_LOG
    child = await Child.start(ChildSpec("export", "export", command, os.environ, log))
    ended = asyncio.create_task(child.wait())
    ends: list[asyncio.Future[Any]] = [ended] if give_up is None else [ended, give_up]
    try:
        await asyncio.wait(ends, timeout=EXPORT_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not ended.done():
            child.kill()
    return await ended == 0


async def export_while_it_runs(config: Config, run_dir: Path, note: Callable[[str], None]) -> None:
    """Exports every ``train.export_every``-th recorded checkpoint. Never returns; a launcher that
    is started again goes on where the earlier one was."""
    every, events, count = config.train.export_every, FileTail(run_dir / "events.jsonl"), 0
    if not every:
        await asyncio.Event().wait()
    while True:
        new: list[dict[str, Any]] = []
        with suppress(OSError, RuntimeError):  # no thread, or no file system, at this moment
            new = await asyncio.to_thread(lambda: list(events.records()))
        for event in new:
            count += event["type"] == EventType.CHECKPOINT_RECORDED
            if event["type"] != EventType.CHECKPOINT_RECORDED or count % every:
                continue
            checkpoint, out = event["path"], run_dir / "exports" / f"step-{event['step']:06d}"
            try:
                if await asyncio.to_thread(_is_due, checkpoint, out):
                    done = await export_checkpoint(config, run_dir, checkpoint, out)
                    note(f"exported {out}" if done else f"{out} is not exported: see {EXPORT_LOG}")
            except Exception as error:  # an export never ends the run
                note(f"{out} is not exported: {in_words(error, run_dir)}")
        await asyncio.sleep(POLL_S)


def _is_due(checkpoint: str, out: Path) -> bool:
    """``checkpoint`` is still there, and ``out`` is no export of it."""
    exported = ""
    with suppress(OSError, ValueError):
        exported = json.loads((out / "paceline.json").read_text())["checkpoint"]
    return exported != checkpoint and Path(checkpoint).is_dir()
