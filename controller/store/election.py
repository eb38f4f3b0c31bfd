"""Leader election: a lease that runs out, and a term that only rises.

- The lease (SET NX PX) decides who may try; the term decides who may write. Every append to the
  journal carries its term and is refused unless that is still the highest one granted.
- A new term is the Redis clock in milliseconds, or one more than any term known where that is
  higher: after a Sentinel failover the counter may have stepped back, and a term must never repeat.
- A leader trusts its own monotonic clock, not its hopes: past ``lease_until`` it does not act.
- A leader whose lease ran out while Redis was away goes on in its term if nobody was granted
  another one meanwhile: then nobody else has written.
"""

from __future__ import annotations

import logging
from typing import Any

from controller.clock import SYSTEM_CLOCK, Clock
from controller.store.lua_scripts import Script
from controller.store.redis_durability import replicated
from controller.store.redis_keys import Keys
from paceline.process.structured_log import event
from paceline.redis.leader_lease import DELETE_IF_EQUAL, LeaderIdentity

log = logging.getLogger(__name__)

# KEYS: leader, term, head. ARGV: identity, lease in ms, highest term known to the candidate.
_ACQUIRE = Script("""
if redis.call('EXISTS', KEYS[1]) == 1 then return false end
local now = redis.call('TIME')
local term = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local granted = tonumber(redis.call('GET', KEYS[2]) or '0')
local written = tonumber(redis.call('HGET', KEYS[3], 'term') or '0')
local known = tonumber(ARGV[3])
term = math.max(term, granted + 1, written + 1, known + 1)
local text = string.format('%.0f', term)
redis.call('SET', KEYS[2], text)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return text
""")

# KEYS: leader, term. ARGV: identity, lease in ms, term.
_RENEW = Script("""
if redis.call('GET', KEYS[2]) ~= ARGV[3] then return 0 end
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
-- A server at its memory limit refuses to set, and still extends.
if not holder or redis.call('PEXPIRE', KEYS[1], ARGV[2]) == 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1
""")

_RELEASE = Script(DELETE_IF_EQUAL)


class Election:
    """One candidate. Redis errors propagate: the caller knows whether it leads or waits."""

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
        self.lease_until = 0.0
        """On this process's monotonic clock. Counted from before the request left, so it ends no
        later than the lease in Redis does."""

    async def acquire(self, known_term: int) -> int | None:
        """The new term, or None while somebody holds the lease."""
        began = self._clock.monotonic()
        term = await self._grant(known_term)
        if term is not None:
            self.lease_until = began + self._lease_s
        return term

    async def renew(self, term: int) -> bool:
        """Extends the lease; False where another term was granted or another process holds it."""
        began = self._clock.monotonic()
        kept = await self._extend(term)
        self.lease_until = began + self._lease_s if kept else 0.0
        return kept

    @property
    def holds_lease(self) -> bool:
        return self._clock.monotonic() < self.lease_until

    async def release(self) -> None:
        """Lets a standby take over at once."""
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
        # With replicas behind it, a term must survive the loss of this Redis.
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
        """Whether ``term`` is the highest granted."""
        return bool((await self._redis.get(self._keys.term) or b"").decode() == str(term))

    async def holder(self) -> tuple[LeaderIdentity | None, float]:
        """Who holds the lease now, and for how many seconds more unless it is renewed."""
        async with self._redis.pipeline(transaction=False) as both:
            both.get(self._keys.leader)
            both.pttl(self._keys.leader)
            value, left_ms = await both.execute()
        return LeaderIdentity.from_json(value) if value else None, max(0, left_ms) / 1e3
