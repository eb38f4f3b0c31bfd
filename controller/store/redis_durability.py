"""Redis durability: a check that a replica of Redis has all earlier writes."""

from typing import Any

from redis.exceptions import ResponseError

from controller.store.redis_keys import Keys

WAIT_MS = 200


async def replicated(redis: Any, keys: Keys, *, expected: bool = False) -> bool:
    """True if a replica has all earlier writes, or if no replica is connected and none is
    ``expected``. Set ``expected`` behind Sentinels: a replica that is not connected is then no
    better than one that lags. Redis errors propagate."""
    info = await redis.info("replication")
    if not info.get("connected_slaves", 0):
        return not expected
    async with redis.pipeline(transaction=False) as pipe:
        # WAIT concerns the last write of its own connection. Replicas receive writes in order.
        pipe.set(keys.mark, "1")
        pipe.execute_command("WAIT", 1, WAIT_MS)
        try:
            _, confirmed = await pipe.execute()
        except ResponseError:
            return False
    return bool(confirmed)
