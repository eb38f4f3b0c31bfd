"""Reading of a long run's snapshot: piece by piece, and never of two snapshots."""

import json
from collections.abc import Callable
from typing import Any

from controller.store.journal import FORMAT, SNAPSHOT_PIECE_BYTES, Journal
from controller.store.redis_keys import Keys


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
