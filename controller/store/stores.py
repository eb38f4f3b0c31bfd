"""Stores of one controller: journal, election, payloads, partial rollouts and the run's registry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from controller.clock import SYSTEM_CLOCK, Clock
from controller.store.bulk_transfer import limit_s
from controller.store.election import Election
from controller.store.journal import Journal
from controller.store.partial_store import FilePartials, PartialStore, RedisPartials
from controller.store.payloads import FilePayloads, PayloadStore, RedisPayloads
from controller.store.redis_keys import Keys
from controller.store.run_registry import RunRegistry
from paceline.config.schema import Config
from paceline.redis.client import connect
from paceline.redis.leader_lease import LeaderIdentity


@dataclass(slots=True)
class Stores:
    journal: Journal
    election: Election
    payloads: PayloadStore
    partials: PartialStore
    registry: RunRegistry
    close: Callable[[], Awaitable[None]]
    url: str
    """URL of the Redis with the journal."""
    worker_url: str
    """URL of the same Redis for workers, which exchange their addresses there."""
    payload_dir: str = ""
    """Directory of the payloads; empty: they are in Redis."""


def redis_stores(
    config: Config,
    identity: LeaderIdentity,
    url: str,
    *,
    worker_url: str = "",
    clock: Clock = SYSTEM_CLOCK,
) -> Stores:
    """Stores in the Redis at ``url``; payloads in ``controller.payload_dir`` if that is set.

    ``worker_url``: for workers, if they have another user there.
    """
    redis, keys = connect(url, timeout_s=2.0), Keys(config.run.name)
    lease_s = config.controller.leader_lease_s
    election = Election(redis, keys, identity, lease_s=lease_s, clock=clock)
    # Payloads and appends have time limits of their own, by size: its sockets wait for the longest.
    bulk = connect(url, timeout_s=limit_s(config.controller.max_message_mb << 20))
    payloads: PayloadStore = RedisPayloads(bulk, keys)
    partials: PartialStore = RedisPartials(redis, keys)
    payload_dir = ""
    if shared := config.controller.payload_dir:
        directory = (Path(shared) / config.run.name).resolve()
        payloads, partials = FilePayloads(directory), FilePartials(directory, election.is_newest)
        payload_dir = str(directory)

    async def close() -> None:
        await redis.aclose()
        await bulk.aclose()

    return Stores(
        journal=Journal(redis, keys, payloads, bulk),
        election=election,
        payloads=payloads,
        partials=partials,
        registry=RunRegistry(redis, keys),
        close=close,
        url=url,
        worker_url=worker_url or url,
        payload_dir=payload_dir,
    )
