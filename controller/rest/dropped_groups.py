"""Groups that were dropped lately, with the reason and what was known of them.

Routine drops (too stale, nothing to learn from) are in no run file: the journal is followed for
them, from what it still keeps, and only once somebody asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from controller.rest.redaction import Redactor
from controller.store.journal import START

if TYPE_CHECKING:
    from controller.replicated_controller import Controller

log = logging.getLogger(__name__)

MOST = 200
"""Kept of each reason: the end of a run drops many at once."""
MOST_REASONS = 64
FACTS = (
    *("sequences", "tokens", "reward_mean", "reward_std", "reward_max"),
    *("min_version", "max_version"),
)


class DroppedGroups:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._scrub = Redactor(controller.run_dir)
        self._at = START
        self._following = asyncio.Lock()
        self._owners: dict[str, str] = {}
        """Of tasks that are leased."""
        self._accepted: dict[str, dict[str, Any]] = {}
        """Facts of groups that are ready: what is in a step is dropped no more."""
        self._dropped: dict[str, deque[dict[str, Any]]] = {}

    async def recent(self, reason: str | None) -> list[dict[str, Any]]:
        """Summaries of dropped groups, of ``reason`` or of any. Where a group was refused as it was
        handed in, or never was, nothing is known of it: its sequences are 0."""
        await self._follow()
        return [
            group
            for why, groups in self._dropped.items()
            if reason is None or why == reason
            for group in groups
        ]

    async def reason_of(self, group_id: str) -> str | None:
        """Why the group was dropped; None where it was not, or long ago."""
        for group in await self.recent(None):
            if group["group_id"] == group_id:
                return str(group["reason"])
        return None

    async def _follow(self) -> None:
        async with self._following:
            try:
                while entries := await self._controller.journal.scan(self._at):
                    for entry in entries:
                        for event in entry.events:
                            self._take(entry.t, event)
                    self._at = entries[-1].at.entry
            except (RedisError, OSError) as error:
                log.debug("journal not read error=%s", type(error).__name__)

    def _take(self, t: float, event: Mapping[str, Any]) -> None:
        kind = event.get("type")
        if kind == "TasksLeased":
            for task_id, *_ in event["leases"]:
                self._owners[task_id] = str(event["worker_id"])
        elif kind == "EvalTaskDone":
            self._owners.pop(str(event["task_id"]), None)
        elif kind == "GroupAccepted":
            self._owners.pop(str(event["task_id"]), None)
            known = {name: event[name] for name in FACTS if name in event}
            self._accepted[str(event["task_id"])] = {**known, "owner": event["worker_id"]}
        elif kind == "StepOpened":
            for task_id in event["groups"]:
                self._accepted.pop(task_id, None)
        elif kind == "TaskDropped":
            task_id, reason = str(event["task_id"]), str(event["reason"])
            owner = self._owners.pop(task_id, "")
            known = self._accepted.pop(task_id, {})
            if not task_id.startswith("t") or (
                reason not in self._dropped and len(self._dropped) >= MOST_REASONS
            ):
                return
            self._dropped.setdefault(reason, deque(maxlen=MOST)).append(
                {
                    "group_id": task_id,
                    "attempt": int(event["attempt"]),
                    "state": "dropped",
                    "owner": owner,
                    **dict.fromkeys(("sequences", "tokens"), 0),
                    **dict.fromkeys(("reward_mean", "reward_std", "reward_max"), 0.0),
                    **dict.fromkeys(("min_version", "max_version"), -1),
                    **known,
                    "staleness": 0,
                    "step": 0,
                    "reason": reason,
                    "detail": self._scrub.text(str(event.get("detail") or "")),
                    "dropped_t": t,
                }
            )
