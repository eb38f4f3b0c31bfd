"""Redis of a run: the names of its keys, Lua scripts, and a check that writes are replicated."""

import hashlib
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from paceline.redis.leader_lease import controllers_key, lease_key


class Keys:
    """All keys of one run. Every one begins with ``paceline:<run id>:``."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._prefix = f"paceline:{run_id}:"
        self.journal = self._prefix + "journal"
        """Stream of entries; one entry is all events of one flush."""
        self.head = self._prefix + "head"
        """Hash {batch, position, n, term, format} of the newest entry; appends name it."""
        self.snapshot = self._prefix + "snapshot"
        self.config = self._prefix + "config"
        """Canonical JSON of the config sections that every process of the run must agree on."""
        self.payloads_at = self._prefix + "payloads-at"
        """JSON list of the URLs of the payload store; empty: they are in this Redis."""
        self.mark = self._prefix + "mark"  # Written to test whether writes reach a replica
        self.term = self._prefix + "term"
        """Highest granted term: an append with a lower one is refused."""
        self.leader = lease_key(run_id)
        self.controllers = controllers_key(run_id)

    def staged_snapshot(self, name: str) -> str:
        """A snapshot that is being written."""
        return f"{self.snapshot}:{name}"


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
