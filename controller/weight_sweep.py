"""Sweep of the weight store: the leader deletes the weights that no worker can need any more.

Needed are the newest weights that the ledger knows, later ones that a replica may be writing, and
those that a rollout worker reads. While a living rollout worker has no session, nobody knows what
it reads, and nothing is deleted.
"""

import asyncio
import logging

from redis.exceptions import RedisError

from controller.leader import Leader
from controller.ledger.enums import Role
from paceline.ids import stored_version
from paceline.process.structured_log import event
from paceline.weights.weight_store import WeightStore, prefix_of

POLL_S = 1.0
log = logging.getLogger(__name__)


async def sweep_weights(leader: Leader, store: WeightStore) -> None:
    """Deletes older weights whenever there are newer ones; until it is cancelled."""
    swept = ""
    while True:
        await asyncio.sleep(POLL_S)
        newest, kept = leader.ledger.state.versions.stored, _read(leader)
        if newest in ("", swept) or kept is None or not leader.active:
            continue
        kept.add(prefix_of(newest))
        try:
            # What the ledger says must be durable, and no successor may know it better.
            await leader.group_commit.durable()
            if await leader.election.renew(leader.term):
                await store.sweep(stored_version(newest), kept)
                swept = newest
        except (RedisError, OSError) as error:
            event(log, "stored weights not deleted", logging.WARNING, why=error)


def _read(leader: Leader) -> set[str] | None:
    """Prefixes of the weights that rollout workers read; None if one of them cannot be heard."""
    workers = leader.ledger.state.fleet.living(Role.ROLLOUT)
    found = [leader.sessions.of(*worker.who) for worker in workers]
    sessions = [session for session in found if session is not None]
    read = {prefix_of(session.report.stored_weights) for session in sessions}
    return read if len(sessions) == len(workers) else None
