"""Lua scripts of Redis: called by digest, and loaded again after a restart of Redis."""

import hashlib
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError


class Script:
    """One script. Its replies are integers, bytes, or lists of them."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def run(self, redis: Any, keys: Sequence[str], args: Sequence[Any]) -> Any:
        try:
            return await redis.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await redis.eval(self.source, len(keys), *keys, *args)
