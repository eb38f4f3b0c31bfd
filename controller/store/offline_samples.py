"""Stored samples of a run, read from Redis without a controller. Writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from controller.rest import samples
from controller.rest.problem_details import Problem
from controller.store.journal import Journal
from controller.store.ledger_follower import LedgerFollower
from controller.store.payloads import FilePayloads, PayloadStore, RedisPayloads
from controller.store.redis_keys import Keys
from paceline.redis.client import connect, without_password
from paceline.redis.server import NoRedis


async def kept_groups(
    redis_url: str, run_id: str, wanted: samples.Filter, sort: str, limit: int
) -> dict[str, Any]:
    """``groups``, each as in ``GET groups/{id}``, and ``total``, their number before the limit.

    Raises NoRedis if the journal cannot be read.
    """
    client = connect(redis_url, timeout_s=30.0)
    keys = Keys(run_id)
    try:
        where = (await client.get(keys.payloads_at) or b"").decode()
        payloads: PayloadStore = FilePayloads(Path(where)) if where else RedisPayloads(client, keys)
        replica = await LedgerFollower.load(Journal(client, keys, payloads))
        state = replica.ledger.state
        found = samples.listed(samples.kept_groups(state), wanted, sort, limit)
        details = []
        for summary in found.groups:
            try:
                group = await samples.read_group(state, payloads, summary.group_id)
                details.append(group.model_dump(mode="json"))
            except Problem:
                continue  # deleted meanwhile, because a checkpoint covers it
        return {"groups": details, "total": found.total}
    except (RedisError, OSError) as error:
        raise NoRedis(
            f"the journal at {without_password(redis_url)} cannot be read: {error}"
        ) from error
    finally:
        await client.aclose()
