"""Longest pause of an event loop while a snapshot of many uncovered groups is taken and saved."""

import asyncio
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from controller.ledger import Ledger
from controller.ledger.enums import Kind, Role
from controller.ledger.specs import GroupMeta
from controller.ledger.state.fleet import Worker
from controller.ledger.state.tasks import Task, TaskState
from controller.store.journal import Journal, LedgerSnapshot, Position
from controller.store.redis_keys import Keys
from paceline.config.sections.services import RedisConfig
from paceline.ids import Step, TaskId, Version
from paceline.redis.client import connect
from paceline.redis.server import ensure_redis, stop_redis

GROUPS_PER_STEP = 512
WORKERS = 1000


async def measure(groups: int) -> dict[str, Any]:
    """``pause_ms``: the longest time between two turns of the loop that another task had;
    ``pause_cpu_ms``: of this thread's own CPU time. The journal is in a Redis
    of its own. ``gets_ms``: the longest time in which that answered another client meanwhile."""
    with tempfile.TemporaryDirectory(prefix="paceline-snapshot-") as name:
        endpoint = ensure_redis(Path(name), RedisConfig())
        try:
            return await _measure(groups, endpoint.url)
        finally:
            stop_redis(Path(name))


async def _measure(groups: int, url: str) -> dict[str, Any]:
    keys, redis, other = Keys("scale"), connect(url, timeout_s=2.0), connect(url)
    journal = Journal(redis, keys)
    await redis.set(keys.term, "1")
    ledger = _long_run(groups)
    gc.collect()
    gc.freeze()  # this and the thresholds: as in the controller
    gc.set_threshold(20_000, 20, 50)
    done = asyncio.Event()
    watches = [
        asyncio.create_task(_longest_pause(done, time.monotonic)),
        asyncio.create_task(_longest_pause(done, time.thread_time)),
        asyncio.create_task(_longest_get(other, done)),
    ]
    await asyncio.sleep(0.01)
    began = time.monotonic()
    state = ledger.begin_snapshot()
    taken_s = time.monotonic() - began
    snapshot = LedgerSnapshot(Position("1-0", 1, "batch"), state, 1.0)
    await journal.save_snapshot(snapshot, term=1, trim_before="")
    state["tasks"]["records"].close()
    seconds = time.monotonic() - began
    done.set()
    pause_s, cpu_s, get_s = await asyncio.gather(*watches)
    size = await redis.strlen(keys.snapshot)
    await redis.aclose()
    await other.aclose()
    gc.unfreeze()
    return {
        "groups": groups,
        "pause_ms": 1e3 * pause_s,
        "pause_cpu_ms": 1e3 * cpu_s,
        "taken_ms": 1e3 * taken_s,
        "gets_ms": 1e3 * get_s,
        "seconds": seconds,
        "bytes": size,
    }


async def _longest_get(redis: Any, done: asyncio.Event) -> float:
    longest = 0.0
    while not done.is_set():
        began = time.monotonic()
        await redis.get("paceline:none")
        longest = max(longest, time.monotonic() - began)
        await asyncio.sleep(0.01)
    return longest


async def _longest_pause(done: asyncio.Event, clock: Callable[[], float]) -> float:
    longest, last = 0.0, clock()
    while not done.is_set():
        await asyncio.sleep(0)
        now = clock()
        longest, last = max(longest, now - last), now
    return longest


def _long_run(groups: int) -> Ledger:
    """Trained steps without a checkpoint, and ``WORKERS`` workers."""
    ledger = Ledger()
    for n in range(WORKERS):
        ledger.state.fleet.register(
            Worker(f"rollout-{n}", 1, Role.ROLLOUT, f"host-{n}", 1, "10.0.0.1", 1, Version(-1))
        )
    book, steps = ledger.state.tasks, ledger.state.steps
    book.cursor = book.trained = groups
    for n in range(groups):
        task_id, version = TaskId(f"t{n}"), Version(n // GROUPS_PER_STEP)
        meta = GroupMeta(
            task_id, 1, 16, 180, 65_536 + n % 997, version, version, 0.5 + n / 1e8, 0.49, 1.0
        )
        state, owner = TaskState.TRAINED, f"rollout-{n % 1000}"
        book.records[task_id] = Task(task_id, Kind.TRAIN, n, state, 1, owner, group=meta)
    for first in range(0, groups, GROUPS_PER_STEP):
        ids = [TaskId(f"t{n}") for n in range(first, min(groups, first + GROUPS_PER_STEP))]
        steps.history[Step(first // GROUPS_PER_STEP + 1)] = tuple(ids)
    return ledger
