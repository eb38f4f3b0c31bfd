"""Leader election: a lease that expires, and a term that only rises.

- A controller needs the lease (SET NX PX) to lead, and the highest term to write. Every append to
  the journal carries its writer's term and is refused if a higher one was granted.
- A new term is the Redis clock in milliseconds, or the highest known term plus one if that is
  larger. A Sentinel failover may lose the newest term, and a term must never be granted twice.
- A leader measures its lease with its own monotonic clock, and does not act after ``lease_until``.
- A lease that was released stays released, whatever renewals are under way then.
- A Redis at its memory limit grants and renews the lease (a hundred bytes), too.
- If a leader's lease expired while Redis did not answer, and no other term was granted since,
  nobody else has written. The leader then continues in its term.
"""

import asyncio
import logging
from typing import Any

from controller.runtime import SYSTEM_CLOCK, Clock
from controller.store.redis_keys import Keys, Script, replicated
from paceline.process.structured_log import event
from paceline.redis.leader_lease import DELETE_IF_EQUAL, LeaderIdentity

log = logging.getLogger(__name__)

# KEYS: leader, term, head. ARGV: identity, lease in ms, highest term known to the candidate.
_ACQUIRE = Script("""
if redis.call('EXISTS', KEYS[1]) == 1 then
  -- Redis counts by its wall clock: set back, the lease would outlive its leader by the difference.
  if redis.call('PTTL', KEYS[1]) > tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  return false
end
local now = redis.call('TIME')
local term = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local granted = tonumber(redis.call('GET', KEYS[2]) or '0')
local written = tonumber(redis.call('HGET', KEYS[3], 'term') or '0')
local known = tonumber(ARGV[3])
term = math.max(term, granted + 1, written + 1, known + 1)
local text = string.format('%.0f', term)
-- A server at its memory limit refuses SET as the first write of a script, and accepts it after
-- a DEL.
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], text)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return text
""")

# KEYS: leader, term. ARGV: identity, lease in ms, term.
_RENEW = Script("""
if redis.call('GET', KEYS[2]) ~= ARGV[3] then return 0 end
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
-- PEXPIRE also if the lease has run out: a server at its memory limit refuses SET as the first
-- write of a script, and accepts it after a PEXPIRE.
if redis.call('PEXPIRE', KEYS[1], ARGV[2]) == 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1
""")

_RELEASE = Script(DELETE_IF_EQUAL)


class Election:
    """One candidate. Redis errors propagate to the caller."""

    def __init__(
        self,
        redis: Any,
        keys: Keys,
        identity: LeaderIdentity,
        *,
        lease_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._redis = redis
        self._keys = keys
        self._identity = identity.to_json()
        self._lease_s = lease_s
        self._lease_ms = max(1, round(lease_s * 1000))
        self.released = False  # The lease was given up. Nobody renews it.
        self._seen_term = 0  # By a worker, of this controller or another one
        self._one_request = asyncio.Lock()
        """A renewal that overtook a release would take the lease again, for nobody."""
        self.lease_until = 0.0
        """On this process's monotonic clock. Counted from before the request was sent, so it ends
        no later than the lease in Redis."""

    async def acquire(self, known_term: int) -> int | None:
        began = self._clock.monotonic()
        term = await self._grant(max(known_term, self._seen_term))
        if term is not None:
            self.released = False
            self.lease_until = began + self._lease_s
        return term

    async def renew(self, term: int) -> bool:
        """Extends the lease; False if another term was granted, another process holds it, or it was
        released."""
        async with self._one_request:
            if self.released:
                return False
            began = self._clock.monotonic()
            kept = await self._extend(term)
            self.lease_until = began + self._lease_s if kept else 0.0
            return kept

    def saw(self, term: int) -> None:
        """A worker has seen ``term``: the next one is higher."""
        self._seen_term = max(self._seen_term, term)

    @property
    def holds_lease(self) -> bool:
        return self._clock.monotonic() < self.lease_until

    async def release(self) -> None:
        """Deletes the lease, so that a standby takes over at once."""
        async with self._one_request:
            self.released = True
            self.lease_until = 0.0
            await self._delete()

    # ---- Redis ----------------------------------------------------------------------------

    async def _grant(self, known_term: int) -> int | None:
        granted = await _ACQUIRE.run(
            self._redis,
            [self._keys.leader, self._keys.term, self._keys.head],
            [self._identity, self._lease_ms, known_term],
        )
        if granted is None:
            return None
        # If Redis has replicas, the term must survive the loss of this server.
        if not await replicated(self._redis, self._keys):
            event(log, "no replica confirmed the term", term=int(granted), level=logging.WARNING)
        return int(granted)

    async def _extend(self, term: int) -> bool:
        kept = await _RENEW.run(
            self._redis,
            [self._keys.leader, self._keys.term],
            [self._identity, self._lease_ms, str(term)],
        )
        return bool(kept)

    async def _delete(self) -> None:
        await _RELEASE.run(self._redis, [self._keys.leader], [self._identity])

    async def is_newest(self, term: int) -> bool:
        """True if ``term`` is the highest granted term."""
        return bool((await self._redis.get(self._keys.term) or b"").decode() == str(term))

    async def holder(self) -> tuple[LeaderIdentity | None, float]:
        """The holder of the lease, and the seconds until it expires without a renewal."""
        async with self._redis.pipeline(transaction=False) as both:
            both.get(self._keys.leader)
            both.pttl(self._keys.leader)
            value, left_ms = await both.execute()
        return LeaderIdentity.from_json(value) if value else None, max(0, left_ms) / 1e3
