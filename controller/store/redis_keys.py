"""Names of a run's keys in Redis."""

from paceline.payloads.redis_payloads import payload_key
from paceline.redis.leader_lease import controllers_key, lease_key


class Keys:
    """All keys of one run. Every one begins with ``paceline:<run id>:``."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._prefix = f"paceline:{run_id}:"
        self.journal = self._prefix + "journal"
        """Stream of entries; one entry is all events of one flush."""
        self.head = self._prefix + "head"
        """Hash {batch, position, n, term, format} of the newest entry, which the next append names.
        """
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

    def payload(self, task_id: str, attempt: int) -> str:
        return payload_key(self.run_id, task_id, attempt)
