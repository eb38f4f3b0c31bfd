"""The leader's lease in Redis, as anyone may read it, and its early release by a launcher.

A launcher that saw the leading process end need not wait for the lease to run out: it deletes the
lease, if it still names that very process, and a standby takes over at once. The term, not the
lease, fences the journal, so an early release can never let two leaders write.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

import redis

from paceline.redis.client import connect_sync

LOOK_S = 0.02

DELETE_IF_EQUAL = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


@dataclass(frozen=True, slots=True)
class LeaderIdentity:
    """One process as a candidate; its JSON form is the value of the lease."""

    controller_id: str
    address: str
    host: str
    pid: int
    nonce: str
    """Drawn at start: a process of the same id and pid after a restart is another candidate."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, value: str | bytes) -> LeaderIdentity:
        return cls(**json.loads(value))


def lease_key(run_id: str) -> str:
    return f"paceline:{run_id}:leader"


def controllers_key(run_id: str) -> str:
    """Hash: controller id to JSON {address, pid, host, state, t}."""
    return f"paceline:{run_id}:controllers"


def release_dead(url: str, run_id: str, controller_id: str, pid: int) -> bool:
    """Deletes the lease if it names process ``pid`` of ``controller_id`` on this host.

    Only for callers that know that process has ended. Returns True where a lease was released;
    False also where Redis does not answer, since the lease then runs out by itself.
    """
    try:
        with _client(url) as client:
            value = client.get(lease_key(run_id))
            if not value:
                return False
            leader = LeaderIdentity.from_json(value)
            if (leader.controller_id, leader.pid, leader.host) != (
                controller_id,
                pid,
                socket.gethostname(),
            ):
                return False
            return bool(client.eval(DELETE_IF_EQUAL, 1, lease_key(run_id), value))
    except (redis.RedisError, OSError):
        return False


def living_leader(url: str, run_id: str) -> LeaderIdentity | None:
    """Who leads the run and goes on to; None where nobody does.

    A lease that its holder's death left behind is waited for until it has run out, one that is renewed
    is somebody's. Blocks for no longer than that. Raises redis' own errors.
    """
    with _client(url) as client:
        before_ms = client.pttl(lease_key(run_id))
        while (left_ms := client.pttl(lease_key(run_id))) > 0:
            if left_ms > before_ms:
                value = client.get(lease_key(run_id))
                return LeaderIdentity.from_json(value) if value else None
            before_ms = left_ms
            # Nothing says when a key has run out or was renewed.
            time.sleep(LOOK_S)
    return None


def _client(url: str) -> Any:
    return connect_sync(url, timeout_s=1.0)
