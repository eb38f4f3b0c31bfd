"""Stores of one controller: journal, election, payloads and the run's registry."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from controller.runtime import SYSTEM_CLOCK, Clock
from controller.store.election import Election
from controller.store.journal import Journal
from controller.store.redis_keys import Keys
from controller.store.run_registry import RunRegistry
from paceline.config.schema import Config
from paceline.payloads.open_store import open_or_refuse
from paceline.payloads.store import PayloadStore
from paceline.payloads.transfer_limits import limit_s
from paceline.redis.client import connect
from paceline.redis.leader_lease import LeaderIdentity


@dataclass(slots=True)
class Stores:
    journal: Journal
    election: Election
    payloads: PayloadStore
    registry: RunRegistry
    close: Callable[[], Awaitable[None]]
    url: str  # URL of the Redis with the journal
    worker_url: str  # URL of the same Redis for workers, which exchange their addresses there
    payload_urls: Sequence[str] = ()
    """URLs of the payload store, for workers; empty: the Redis of ``worker_url``."""


def redis_stores(
    config: Config,
    identity: LeaderIdentity,
    url: str,
    *,
    worker_url: str = "",
    clock: Clock = SYSTEM_CLOCK,
) -> Stores:
    """Stores in the Redis at ``url``; payloads in those of ``payloads.url`` if that is set.
    ``worker_url``: for workers, if they have another user there."""
    redis, keys = connect(url, timeout_s=2.0), Keys(config.run.name)
    lease_s = config.controller.leader_lease_s
    election = Election(redis, keys, identity, lease_s=lease_s, clock=clock)
    # An append has a time limit of its own, by size: its sockets wait for the longest.
    bulk = connect(url, timeout_s=limit_s(config.controller.max_message_mb << 20))
    urls = config.payloads.urls
    payloads = open_or_refuse(urls, config.run.name, url)

    async def close() -> None:
        await redis.aclose()
        await bulk.aclose()
        await payloads.close()

    return Stores(
        journal=Journal(redis, keys, bulk),
        election=election,
        payloads=payloads,
        registry=RunRegistry(redis, keys),
        close=close,
        url=url,
        worker_url=worker_url or url,
        payload_urls=urls,
    )
