"""Reward functions that hang while a file is there, as a judge whose server is gone."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from testbed.faults.failpoints import VARIABLE

WAIT_S = 0.5
"""Some two steps a second: a fleet that a test waits beside leaves the cores to others."""


def file_of(armed: Path, name: str) -> Path:
    """As long as it is there, the function ``name`` does not return. ``armed``: as for
    failpoints."""
    return armed / f"hang-{name}"


async def judge(completion: str) -> float:
    """Waits for its judge; 1 if the completion begins with a digit."""
    await asyncio.sleep(WAIT_S)
    while _hangs("judge"):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return float(completion[:1].isdigit())


async def careless(completion: str) -> float:
    """The same, with a call that blocks the event loop it runs on."""
    await asyncio.sleep(WAIT_S)
    while _hangs("careless"):
        time.sleep(0.1)  # noqa: ASYNC251
    return float(completion[:1].isdigit())


def _hangs(name: str) -> bool:
    return file_of(Path(os.environ[VARIABLE]), name).exists()
