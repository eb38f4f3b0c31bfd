"""Dropped groups are found in the journal, with what it said of them before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from controller.rest.replies.dropped_groups import MOST, DroppedGroups
from controller.store.journal import Entry, Position


class Journal:
    """Entries in memory, handed out a few at a time."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def append(self, *events: dict[str, Any]) -> None:
        number = len(self.entries) + 1
        self.entries.append(Entry(Position(f"{number}-0", number), 1, float(number), events))

    async def scan(self, after: str) -> list[Entry]:
        start = int(after.split("-")[0])
        return self.entries[start : start + 3]


def leased(*task_ids: str) -> dict[str, Any]:
    leases = [[task_id, 1, "train", 0, 0, 1] for task_id in task_ids]
    return {"type": "TasksLeased", "worker_id": "rollout-1", "leases": leases}


def accepted(task_id: str) -> dict[str, Any]:
    facts = {"sequences": 8, "tokens": 90, "reward_mean": 0.25, "reward_std": 0.4}
    more = {"reward_max": 1.0, "min_version": 3, "max_version": 4, "attempt": 1}
    head = {"type": "GroupAccepted", "worker_id": "rollout-1", "task_id": task_id}
    return {**head, **facts, **more}


def dropped(task_id: str, reason: str, detail: str = "") -> dict[str, Any]:
    head = {"type": "TaskDropped", "task_id": task_id, "attempt": 1}
    return {**head, "reason": reason, "detail": detail}


async def test_a_group_that_grew_stale_is_told_with_its_facts_and_others_with_none() -> None:
    journal = Journal()
    drops = DroppedGroups(SimpleNamespace(journal=journal, run_dir=Path("/srv/run")))  # type: ignore[arg-type]
    journal.append(leased("t1", "t2", "t3"))
    journal.append(accepted("t1"), accepted("t3"))
    journal.append({"type": "StepOpened", "groups": ["t3"]})
    assert await drops.recent(None) == []
    journal.append(dropped("t1", "stale", "3 steps"))
    journal.append(dropped("t2", "quarantined", "cannot open /home/me/rewards.py"))
    journal.append(dropped("e0.1", "quarantined"))
    (stale,) = await drops.recent("stale")
    assert (stale.group_id, stale.owner, stale.dropped_t) == ("t1", "rollout-1", 4.0)
    assert (stale.tokens, stale.reward_mean, stale.max_version) == (90, 0.25, 4)
    (given_up,) = await drops.recent("quarantined")
    assert (given_up.sequences, given_up.owner) == (0, "rollout-1")
    assert given_up.detail == "cannot open …/rewards.py"
    assert await drops.reason_of("t2") == "quarantined" and await drops.reason_of("t3") is None


async def test_a_group_that_left_its_step_is_told_with_its_lengths() -> None:
    journal = Journal()
    drops = DroppedGroups(SimpleNamespace(journal=journal, run_dir=Path("/srv/run")))  # type: ignore[arg-type]
    journal.append(leased("t1", "t2"), accepted("t1"), accepted("t2"))
    journal.append({"type": "StepOpened", "groups": ["t1", "t2"]})
    large = {"sequences": 2, "tokens": 90, "prompt_tokens": 30, "lengths": [10, 870]}
    journal.append({**dropped("t1", "out_of_memory", "p0: 80 GiB"), "group": large})
    journal.append({"type": "StepOpened", "groups": ["t2"]}, {"type": "StepCommitted"})
    journal.append(dropped("t2", "run_ended"))
    (told,) = await drops.recent("out_of_memory")
    assert (told.tokens, told.lengths, told.owner) == (90, [40, 900], "rollout-1")
    (late,) = await drops.recent("run_ended")
    assert late.sequences == 0, "trained: nothing is remembered of it"


async def test_one_reason_does_not_crowd_out_another_and_memory_is_bounded() -> None:
    journal = Journal()
    drops = DroppedGroups(SimpleNamespace(journal=journal, run_dir=Path("/srv/run")))  # type: ignore[arg-type]
    journal.append(dropped("t0", "stale"))
    journal.append(*(dropped(f"t{n}", "run_ended") for n in range(1, MOST + 50)))
    found = await drops.recent(None)
    assert len(found) == MOST + 1 and len(await drops.recent("stale")) == 1
    assert not drops._accepted and not drops._owners
