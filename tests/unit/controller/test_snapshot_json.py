"""Snapshots of long runs: no request waits for the whole of one, written or read."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from controller.ledger import Ledger, codec
from controller.ledger import ledger as ledger_module
from controller.ledger.state.tasks import Task
from controller.store.journal import FORMAT, SNAPSHOT_PIECE_BYTES, Journal, LedgerSnapshot, Position
from controller.store.redis_keys import Keys
from controller.store.snapshot_json import PIECE, slices
from paceline.observe.projection import Totals
from testbed.simulator.faults import run_schedule
from tests.fixtures.ledgers import Driven

DROPS = 100_000


class StoredJournal(Journal):
    """Keeps the snapshot's text in memory."""

    text = ""
    staged = ""
    pieces = 0

    async def _stage_snapshot(self, staged: str, offset: int, piece: str) -> None:
        assert offset == len(self.staged)
        self.staged += piece
        self.pieces += 1

    async def _set_snapshot(
        self, last: str, term: int, trim_before: str, staged: str, length: int, at: str
    ) -> bool:
        assert length == len(self.staged)
        self.text = self.staged + last
        return True


def totals_of_a_long_run() -> Totals:
    totals = Totals()
    spans = totals.coverage.dropped.setdefault("uninformative", [])
    for start in range(100, 100 + 3 * DROPS, 3):
        spans += [start, start + 1]
    return totals


async def test_requests_are_answered_while_the_snapshot_of_a_long_run_is_encoded() -> None:
    run = Driven.fleet("p0", "r0")
    run.train()
    state, observed = run.ledger.to_snapshot(), codec.encode(totals_of_a_long_run())
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
    snapshot = LedgerSnapshot(at, state, 1.0, observed)
    await journal.save_snapshot(snapshot, term=1, trim_before="")
    await working
    assert turns > len(journal.text) / 2**17
    stored = json.loads(journal.text)
    assert stored["observed"] == observed
    assert Ledger.from_snapshot(stored["state"]).fingerprint() == json.dumps(
        state, separators=(",", ":")
    )
    assert journal.pieces == len(journal.text) // PIECE


async def save(snapshot: Any) -> Any:
    """What a successor reads."""
    unused: Any = None
    journal = StoredJournal(unused, Keys("run"), unused)
    at = Position("1-0", 1, "batch")
    await journal.save_snapshot(LedgerSnapshot(at, snapshot, 1.0), term=1, trim_before="")
    return json.loads(journal.text)["state"]


async def test_no_task_is_encoded_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Driven.fleet("p0", "r0", groups_per_step=8)
    for _ in range(3):
        run.train()
    encoded: list[str] = []
    inner, _ = codec.codec_of(Task)
    assert inner is not None

    def counted(task: Task) -> Any:
        encoded.append(task.task_id)
        return inner(task)

    monkeypatch.setattr(ledger_module, "codec_of", lambda kind: (counted, None))
    snapshot = run.ledger.begin_snapshot()
    assert encoded == [] and len(run.state.tasks.records) == 24
    await save(snapshot)
    assert len(encoded) == 24


def test_a_snapshot_says_what_was_true_when_it_was_begun() -> None:
    """However much the ledger goes on while it is written: deaths, drops, rollbacks,
    checkpoints."""
    assert sum(map(changed_while_written, range(6))) > 50


def changed_while_written(seed: int) -> int:
    """Tasks that changed while a snapshot of one run's ledger was written, which is done at random
    moments."""
    journal = [e for entry in run_schedule(seed).redis.entries for e in entry.events]
    rng, ledger = random.Random(seed), Ledger()
    remaining, changed = iter(journal), 0
    while (event := next(remaining, None)) is not None:
        ledger.apply(event)
        if rng.random() > 0.1:
            continue
        then, snapshot = ledger.to_snapshot(), ledger.begin_snapshot()
        moment, read = snapshot["tasks"]["records"], {}
        for task_id, task in moment.items():
            if rng.random() < 0.5 and (event := next(remaining, None)) is not None:
                ledger.apply(event)
            read[task_id] = json.loads(json.dumps(task))
        changed += len(moment._kept)
        moment.close()
        snapshot["tasks"]["records"] = read
        assert json.dumps(snapshot) == json.dumps(then)
    return changed


def test_the_groups_of_many_steps_are_many_slices() -> None:
    """As JSON an array of arrays would be one slice, however long those are."""
    steps = [[step, [f"t{n}" for n in range(500)]] for step in range(100)]
    made = list(slices({"history": steps}))
    assert "".join(made) == json.dumps({"history": steps}, separators=(",", ":"))
    assert max(map(len, made)) < 8 * 500


class OneSnapshot:
    """Redis with a snapshot, as far as a reader asks for it."""

    def __init__(self, stored: bytes) -> None:
        self.stored, self.reads = stored, 0
        self.before_read: Callable[[int], None] = lambda number: None

    async def getrange(self, key: str, first: int, last: int) -> bytes:
        self.reads += 1
        self.before_read(self.reads)
        assert last - first < SNAPSHOT_PIECE_BYTES
        return self.stored[first : last + 1]

    async def hmget(self, key: str, *fields: str) -> list[bytes | None]:
        return [None for _ in fields]


def text(number: int, length: int) -> bytes:
    whole = {"format": FORMAT, "at": [f"{number}-0", number, "batch"], "state": {"x": ""}, "t": 1.0}
    whole["state"] = {"x": "a" * (length - len(json.dumps(whole)))}
    return json.dumps(whole).encode()


async def read(redis: OneSnapshot) -> Any:
    unused: Any = redis
    return await Journal(unused, Keys("run")).load_snapshot()


async def test_no_reply_is_longer_than_a_piece() -> None:
    for length in (1000, SNAPSHOT_PIECE_BYTES, 3 * SNAPSHOT_PIECE_BYTES + 1):
        redis = OneSnapshot(text(7, length))
        found = await read(redis)
        assert len(redis.stored) == length
        assert (found.at.number, found.t) == (7, 1.0)
        assert found.state == json.loads(redis.stored)["state"]


async def test_a_snapshot_that_is_replaced_while_it_is_read_is_read_anew() -> None:
    redis = OneSnapshot(text(7, 3 * SNAPSHOT_PIECE_BYTES))

    def replace(number: int) -> None:
        if number == 3:
            redis.stored = text(8, 4 * SNAPSHOT_PIECE_BYTES)

    redis.before_read = replace
    found = await read(redis)
    assert found.at.number == 8
    assert found.state == json.loads(redis.stored)["state"]
