"""Redis durability: would an append survive the loss of its master, and has it reached the disk?"""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from controller.store.redis_keys import Keys

WAIT_MS = 200


async def replicated(redis: Any, keys: Keys, *, expected: bool = False) -> bool:
    """True once a replica has everything that was written before, or where there is none to have it.

    ``expected``: there is to be one, as behind Sentinels; none that is connected is as good as one
    that lags. Redis errors propagate.
    """
    info = await redis.info("replication")
    if not info.get("connected_slaves", 0):
        return not expected
    async with redis.pipeline(transaction=False) as pipe:
        # WAIT is about the last write of its own connection, and replicas get writes in order.
        pipe.set(keys.mark, "1")
        pipe.execute_command("WAIT", 1, WAIT_MS)
        try:
            _, confirmed = await pipe.execute()
        except ResponseError:
            return False
    return bool(confirmed)
