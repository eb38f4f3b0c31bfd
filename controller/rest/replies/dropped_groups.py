"""Recently dropped groups, with the reason and the facts known of them.

Routine drops (too stale, equal rewards) are in no run file. They are read from the part of the
journal that is still kept, from the first request on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from redis.exceptions import RedisError

from controller.replicated_controller import Controller
from controller.rest.redaction import Redactor
from controller.rest.replies.group_replies import FACTS
from controller.rest.schemas import GroupSummary
from controller.store.journal import START
from paceline.observe.vocabulary import EventType

log = logging.getLogger(__name__)

MOST = 200
"""Kept per reason: the end of a run drops many at once."""
MOST_REASONS = 64


class DroppedGroups:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._redactor = Redactor(controller.run_dir)
        self._at = START
        self._following = asyncio.Lock()
        self._owners: dict[str, str] = {}
        """Worker of each leased task."""
        self._accepted: dict[str, dict[str, Any]] = {}
        """Facts of the groups that are ready or in the open step."""
        self._open: tuple[str, ...] = ()
        """Groups of the open step."""
        self._dropped: dict[str, deque[GroupSummary]] = {}

    async def recent(self, reason: str | None) -> list[GroupSummary]:
        """Groups dropped for ``reason``, or for any. If nothing had been generated, the sequences
        of the group are 0."""
        await self._follow()
        return [
            group
            for why, groups in self._dropped.items()
            if reason is None or why == reason
            for group in groups
        ]

    async def reason_of(self, group_id: str) -> str | None:
        """Why the group was dropped; None if it was not dropped lately."""
        found = await self.recent(None)
        return next((group.reason for group in found if group.group_id == group_id), None)

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
        if kind == EventType.TASKS_LEASED:
            for task_id, *_ in event["leases"]:
                self._owners[task_id] = str(event["worker_id"])
        elif kind == EventType.EVAL_TASK_DONE:
            self._owners.pop(str(event["task_id"]), None)
        elif kind == EventType.GROUP_ACCEPTED:
            self._owners.pop(str(event["task_id"]), None)
            known = {name: event[name] for name in FACTS if name in event}
            self._accepted[str(event["task_id"])] = {**known, "owner": event["worker_id"]}
        elif kind == EventType.STEP_OPENED:
            self._open = tuple(event["groups"])
        elif kind == EventType.STEP_COMMITTED:
            for task_id in self._open:
                self._accepted.pop(task_id, None)
            self._open = ()
        elif kind == EventType.TASK_DROPPED:
            task_id, reason = str(event["task_id"]), str(event["reason"])
            owner = self._owners.pop(task_id, "")
            known = self._accepted.pop(task_id, {})
            generated = event.get("group") or {}
            known |= {name: generated[name] for name in FACTS if name in generated}
            prompt = generated.get("prompt_tokens", 0)
            known["lengths"] = [prompt + n for n in generated.get("lengths", ())]
            if not task_id.startswith("t") or (
                reason not in self._dropped and len(self._dropped) >= MOST_REASONS
            ):
                return
            group = GroupSummary(
                group_id=task_id,
                attempt=int(event["attempt"]),
                state="dropped",
                reason=reason,
                detail=self._redactor.text(str(event.get("detail") or "")),
                dropped_t=t,
                **{"owner": owner, **known},
            )
            self._dropped.setdefault(reason, deque(maxlen=MOST)).append(group)
