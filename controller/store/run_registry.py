"""Run registry in Redis: settings that all controllers share, and their addresses."""

import json
from collections.abc import Sequence
from typing import Any

from controller.store.redis_keys import Keys
from paceline.config.changes import differences
from paceline.errors import BadInput
from paceline.redis.client import without_password


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

    async def announce(self, controller_id: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Publishes one controller; returns the facts of every controller by id."""
        await self._redis.hset(self._keys.controllers, controller_id, json.dumps(facts))
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
    return ", ".join(map(without_password, urls_of(stored.encode()))) or "the Redis of its journal"
