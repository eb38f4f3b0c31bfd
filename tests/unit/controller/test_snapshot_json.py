"""Snapshots of long runs: no request waits for the whole of one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from controller.ledger import Ledger
from controller.store.journal import Journal, LedgerSnapshot, Position
from controller.store.redis_keys import Keys
from tests.fixtures.ledgers import Driven

DROPS = 100_000


class StoredJournal(Journal):
    """Keeps the snapshot's text in memory."""

    text = ""

    async def _set_snapshot(self, data: str, term: int, trim_before: str) -> bool:
        self.text = data
        return True


def long_run() -> Ledger:
    run = Driven()
    run.policy("p0")
    run.rollout("r0")
    run.train()
    spans = run.state.tasks.coverage.dropped.setdefault("uninformative", [])
    for start in range(100, 100 + 3 * DROPS, 3):
        spans += [start, start + 1]
    return run.ledger


async def test_requests_are_answered_while_the_snapshot_of_a_long_run_is_encoded() -> None:
    state = long_run().to_snapshot()
    unused: Any = None
    journal = StoredJournal(unused, Keys("run"), unused)
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while not journal.text:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(other_work())
    at = Position("1-0", 1, "batch")
    await journal.save_snapshot(LedgerSnapshot(at, state, 1.0), term=1, trim_before="")
    await working
    assert turns > len(journal.text) / 2**17
    stored = json.loads(journal.text)
    assert Ledger.from_snapshot(stored["state"]).fingerprint() == json.dumps(
        state, separators=(",", ":")
    )
