"""The leader's lease in Redis: who holds it, and its early release by a launcher.

A launcher that saw the leading process end deletes the lease, if it still names that process, so
that a standby takes over without waiting for the lease to expire. The term, not the lease, fences
the journal: an early release can never let two leaders write.
"""

import json
import socket
import time
from dataclasses import asdict, dataclass

import redis

from paceline.redis.client import connect_sync

POLL_S = 0.02

DELETE_IF_EQUAL = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


@dataclass(frozen=True, slots=True)
class LeaderIdentity:
    """One candidate process. Its JSON form is the value of the lease."""

    controller_id: str
    address: str
    host: str
    pid: int
    nonce: str
    """Random at each start: a restarted process with the same id and pid is another candidate."""
    fleet: str = ""  # The same for all processes that share the run's token; empty: not known

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, value: str | bytes) -> "LeaderIdentity":
        return cls(**json.loads(value))


def lease_key(run_id: str) -> str:
    return f"paceline:{run_id}:leader"


def controllers_key(run_id: str) -> str:
    """Hash: controller id to JSON {address, pid, host, state, t}."""
    return f"paceline:{run_id}:controllers"


def release_dead(url: str, run_id: str, controller_id: str, pid: int) -> bool:
    """Deletes the lease if it names process ``pid`` of ``controller_id`` on this host. Only for
    callers that know that the process has ended. Returns whether a lease was released; False also
    if Redis does not answer, because the lease then expires by itself."""
    try:
        with connect_sync(url, timeout_s=1.0) as client:
            value = client.get(lease_key(run_id))
            if not value:
                return False
            leader = LeaderIdentity.from_json(value)
            ended = (controller_id, pid, socket.gethostname())
            if (leader.controller_id, leader.pid, leader.host) != ended:
                return False
            return bool(client.eval(DELETE_IF_EQUAL, 1, lease_key(run_id), value))
    except (redis.RedisError, OSError):
        return False


def living_leader(url: str, run_id: str) -> LeaderIdentity | None:
    """The run's leader if it is alive; None if there is none. A lease that is renewed has a living
    holder. A lease whose holder has died expires without a renewal. Blocks until one of the two is
    seen. Raises redis' own errors."""
    with connect_sync(url, timeout_s=1.0) as client:
        before_ms = client.pttl(lease_key(run_id))
        while (left_ms := client.pttl(lease_key(run_id))) > 0:
            if left_ms > before_ms:
                value = client.get(lease_key(run_id))
                return LeaderIdentity.from_json(value) if value else None
            before_ms = left_ms
            # Redis does not notify of the expiry or renewal of a key here.
            time.sleep(POLL_S)
    return None
