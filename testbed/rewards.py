"""Reward functions that wait, as a sandbox or a judge does; that hang while a file is there; and
one that crashes on one prompt and hangs on another, every time."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

from testbed.faults.failpoints import VARIABLE

WAIT_S, LONG_WAIT_S = 0.2, 1.0
JUDGE_S = 0.5
"""Some two steps a second: a fleet that a test waits beside leaves the cores to others."""
KILLS, HANGS = "kills", "hangs"


async def digit_first(completion: str) -> float:
    """1 if the completion begins with a digit; steps last long enough to be looked at."""
    await asyncio.sleep(WAIT_S)
    return float(completion[:1].isdigit())


async def digit_first_later(completion: str) -> float:
    """The same, for a fleet that a test waits beside: its steps leave the cores to others."""
    await asyncio.sleep(LONG_WAIT_S)
    return float(completion[:1].isdigit())


def poison(completion: str, answer: str) -> float:
    """1 if the completion begins with a digit."""
    if answer == KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    if answer == HANGS:
        threading.Event().wait()
    return float(completion[:1].isdigit())


def file_of(armed: Path, name: str) -> Path:
    """As long as it is there, the function ``name`` does not return. ``armed``: as for
    failpoints."""
    return armed / f"hang-{name}"


async def judge(completion: str) -> float:
    """Waits for its judge; 1 if the completion begins with a digit."""
    await asyncio.sleep(JUDGE_S)
    while _hangs("judge"):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return float(completion[:1].isdigit())


async def careless(completion: str) -> float:
    """The same, with a call that blocks the event loop it runs on."""
    await asyncio.sleep(JUDGE_S)
    while _hangs("careless"):
        time.sleep(0.1)  # noqa: ASYNC251
    return float(completion[:1].isdigit())


def _hangs(name: str) -> bool:
    return file_of(Path(os.environ[VARIABLE]), name).exists()
