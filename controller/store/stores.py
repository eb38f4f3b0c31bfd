"""Stores of one controller: journal, election, payloads and the run's registry in Redis, which
holds the settings that all controllers share, and their addresses."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from controller.runtime import SYSTEM_CLOCK, Clock
from controller.store.election import Election
from controller.store.journal import Journal
from controller.store.redis_keys import Keys
from paceline.config.changes import differences
from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.masking import masked
from paceline.payloads.open_store import open_payloads
from paceline.payloads.store import PayloadStore
from paceline.payloads.transfer_limits import limit_s
from paceline.redis.client import connect
from paceline.redis.leader_lease import LeaderIdentity


class RunRegistry:
    def __init__(self, redis: Any, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def agree(self, run: str, payload_urls: Sequence[str], config_json: str) -> None:
        """Stores the settings that all processes of a run must share, or compares them with the
        stored ones. Raises BadInput if they differ."""
        wanted = json.dumps(list(payload_urls)) if payload_urls else ""
        agreed = await self._first(self._keys.payloads_at, wanted)
        if agreed != wanted:
            raise BadInput(
                f"run {run!r} keeps its payloads in {_shown(agreed)}: set payloads.url so, not "
                f"{_shown(wanted)}"
            )
        agreed = await self._first(self._keys.config, config_json)
        if agreed != config_json:
            raise BadInput(
                f"run {run!r} is under way with another config: "
                f"{differences(agreed, config_json)}. Use the run's config, or start a new run "
                "under another run.name. It can begin with the weights of a checkpoint: paceline "
                "up CONFIG --from CHECKPOINT"
            )

    async def payload_urls(self) -> list[str]:
        return urls_of(await self._redis.get(self._keys.payloads_at))

    async def announce(self, controller_id: str, about: dict[str, Any]) -> dict[str, Any]:
        """Publishes one controller; returns what each has published, by id."""
        await self._redis.hset(self._keys.controllers, controller_id, json.dumps(about))
        found = await self._redis.hgetall(self._keys.controllers)
        return {name.decode(): json.loads(value) for name, value in found.items()}

    async def _first(self, key: str, value: str) -> str:
        """The value that was written first."""
        await self._redis.set(key, value, nx=True)
        return (await self._redis.get(key) or b"").decode()


def urls_of(stored: bytes | None) -> list[str]:
    """URLs of the payload store that the registry holds."""
    found: list[str] = json.loads(stored) if stored else []
    return found


def _shown(stored: str) -> str:
    return ", ".join(map(masked, urls_of(stored.encode()))) or "the Redis of its journal"


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
    payloads = open_payloads(urls, config.run.name, url)

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
