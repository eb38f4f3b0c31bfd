"""Run registry in Redis: the settings that all controllers share, and the controllers' addresses."""

from __future__ import annotations

import json
from typing import Any

from controller.store.redis_keys import Keys
from paceline.config.differences import differences
from paceline.errors import BadInput


class RunRegistry:
    """Registry of one run. Redis errors propagate."""

    def __init__(self, redis: Any, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def agree(self, run: str, payload_dir: str, config_json: str) -> None:
        """Stores the settings that all processes of a run must share, or compares them with the stored ones.

        Raises BadInput if they differ.
        """
        agreed = await self._first(self._keys.payloads_at, payload_dir)
        if agreed != payload_dir:
            raise BadInput(
                f"run {run!r} keeps its payloads in {agreed or 'Redis'}: set "
                f"controller.payload_dir so, not {payload_dir or 'none'}"
            )
        agreed = await self._first(self._keys.config, config_json)
        if agreed != config_json:
            raise BadInput(
                f"run {run!r} is under way with another config: "
                f"{differences(agreed, config_json)}. Use the run's config, or start a new run under "
                "another run.name. It can begin with the weights of a checkpoint: paceline up CONFIG "
                "--from CHECKPOINT"
            )

    async def announce(self, controller_id: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Publishes one controller; returns the facts of every controller by id."""
        await self._redis.hset(self._keys.controllers, controller_id, json.dumps(facts))
        found = await self._redis.hgetall(self._keys.controllers)
        return {name.decode(): json.loads(value) for name, value in found.items()}

    async def _first(self, key: str, value: str) -> str:
        """The value that was written first."""
        await self._redis.set(key, value, nx=True)
        return (await self._redis.get(key) or b"").decode()
