"""Recently dropped groups, with the reason and the facts known of them. Routine drops (too stale,
equal rewards) are in no run file: they are folded from the journal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.observe.vocabulary import EventType

MOST = 200  # Kept per reason: the end of a run drops many at once
MOST_REASONS = 64
FACTS = (
    *("sequences", "tokens", "reward_mean", "reward_std", "reward_max"),
    *("min_version", "max_version"),
)  # Facts of an accepted group that are shown
_NOT_STORED = {"transient": True}


@dataclass(slots=True)
class DroppedGroups:
    recent: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Newest drops by reason, each with the fields of a group in the REST interface. If nothing had
    been generated there are no facts."""
    owners: dict[str, str] = field(default_factory=dict, metadata=_NOT_STORED)
    """Worker of each leased task."""
    accepted: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=_NOT_STORED)
    """Facts of the groups that are ready or in the open step."""
    open: tuple[str, ...] = field(default=(), metadata=_NOT_STORED)  # Groups of the open step

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what the ledger's state, as it is in a snapshot, says of tasks under way."""
        for task_id, _, _, now, _, owner, _, _, facts, *_ in state["tasks"]["records"].values():
            if now in ("pending", "leased") and owner:
                self.owners[task_id] = owner
            elif now in ("ready", "in_step") and facts is not None:
                self._accept(task_id, owner, facts)
        self.open = tuple((state["steps"]["open"] or {}).get("groups", ()))

    def take(self, t: float, kind: str, event: Mapping[str, Any]) -> None:
        """Takes the next event of the journal; ``t``: when it was journalled, in Unix seconds."""
        if kind == EventType.TASKS_LEASED:
            for task_id, *_ in event["leases"]:
                self.owners[task_id] = str(event["worker_id"])
        elif kind == EventType.EVAL_TASK_DONE:
            self.owners.pop(str(event["task_id"]), None)
        elif kind == EventType.GROUP_ACCEPTED:
            task_id = str(event["group"]["task_id"])
            self.owners.pop(task_id, None)
            self._accept(task_id, str(event["worker_id"]), event["group"])
        elif kind == EventType.GROUP_LOST:
            self.accepted.pop(str(event["task_id"]), None)
            self.owners[str(event["task_id"])] = str(event["worker_id"])
        elif kind == EventType.STEP_OPENED:
            self.open = tuple(event["groups"])
        elif kind == EventType.STEP_COMMITTED:
            for task_id in self.open:
                self.accepted.pop(task_id, None)
            self.open = ()
        elif kind == EventType.TASK_DROPPED:
            self._drop(t, event)

    def _accept(self, task_id: str, owner: str, facts: Mapping[str, Any]) -> None:
        shown = {name: facts[name] for name in FACTS if name in facts}
        self.accepted[task_id] = {**shown, "owner": owner}

    def _drop(self, t: float, event: Mapping[str, Any]) -> None:
        task_id, reason = str(event["task_id"]), str(event["reason"])
        owner = self.owners.pop(task_id, "")
        facts = self.accepted.pop(task_id, {})
        generated = event.get("group") or {}
        facts |= {name: generated[name] for name in FACTS if name in generated}
        prompt = generated.get("prompt_tokens", 0)
        known = reason in self.recent or len(self.recent) < MOST_REASONS
        if not task_id.startswith("t") or not known:
            return
        group = {
            "owner": owner,
            **facts,
            "lengths": [prompt + n for n in generated.get("lengths", ())],
            "group_id": task_id,
            "attempt": int(event["attempt"]),
            "state": "dropped",
            "reason": reason,
            "detail": str(event.get("detail") or ""),
            "dropped_t": t,
        }
        groups = self.recent.setdefault(reason, [])
        groups.append(group)
        del groups[:-MOST]

    def for_reason(self, reason: str | None) -> list[dict[str, Any]]:
        """Groups dropped for ``reason``; None: for any."""
        groups = self.recent.items()
        return [group for why, found in groups if reason in (None, why) for group in found]

    def reason_of(self, group_id: str) -> str | None:
        """Reason of the group's drop; None if it was not dropped lately."""
        found = self.for_reason(None)
        return next((group["reason"] for group in found if group["group_id"] == group_id), None)
