"""Names of a run's keys in Redis."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.redis.leader_lease import controllers_key, lease_key


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys of one run. Every one begins with ``paceline:<run id>:``."""

    run_id: str

    @property
    def journal(self) -> str:
        """Stream of entries; one entry is all events of one flush."""
        return f"paceline:{self.run_id}:journal"

    @property
    def head(self) -> str:
        """Hash {batch, position, n, term} of the newest entry: what the next append builds on."""
        return f"paceline:{self.run_id}:head"

    @property
    def snapshot(self) -> str:
        return f"paceline:{self.run_id}:snapshot"

    @property
    def config(self) -> str:
        """Canonical JSON of the config sections that every process of the run must agree on."""
        return f"paceline:{self.run_id}:config"

    @property
    def payloads_at(self) -> str:
        """Directory of the payloads; empty where they are in Redis."""
        return f"paceline:{self.run_id}:payloads-at"

    @property
    def mark(self) -> str:
        """Written for no other reason than to see it arrive at a replica."""
        return f"paceline:{self.run_id}:mark"

    @property
    def leader(self) -> str:
        return lease_key(self.run_id)

    @property
    def term(self) -> str:
        """Highest term granted: the fence."""
        return f"paceline:{self.run_id}:term"

    @property
    def controllers(self) -> str:
        return controllers_key(self.run_id)

    def payload(self, task_id: str, attempt: int) -> str:
        return f"paceline:{self.run_id}:payload:{task_id}:{attempt}"

    def partial(self, task_id: str) -> str:
        """Hash {t<attempt>: tokens, d<attempt>: data}: what a running task has so far."""
        return f"paceline:{self.run_id}:partial:{task_id}"
