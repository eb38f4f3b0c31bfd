"""Dropped groups are folded from the journal, with what it said of them before."""

from typing import Any

from paceline.observe.groups import MOST, DroppedGroups


class Journal:
    """Dropped groups of a journal whose entries are a second apart."""

    def __init__(self) -> None:
        self.entries = 0
        self.drops = DroppedGroups()

    def append(self, *events: dict[str, Any]) -> None:
        self.entries += 1
        for event in events:
            self.drops.take(float(self.entries), event["type"], event)


def leased(*task_ids: str) -> dict[str, Any]:
    leases = [[task_id, 1, "train", 0, 0, 1] for task_id in task_ids]
    return {"type": "TasksLeased", "worker_id": "rollout-1", "leases": leases}


def accepted(task_id: str) -> dict[str, Any]:
    facts = {"sequences": 8, "tokens": 90, "reward_mean": 0.25, "reward_std": 0.4}
    more = {"reward_max": 1.0, "min_version": 3, "max_version": 4, "attempt": 1}
    group = {"task_id": task_id, **facts, **more}
    return {"type": "GroupAccepted", "worker_id": "rollout-1", "group": group}


def dropped(task_id: str, reason: str, detail: str = "") -> dict[str, Any]:
    head = {"type": "TaskDropped", "task_id": task_id, "attempt": 1}
    return {**head, "reason": reason, "detail": detail}


def test_a_group_that_grew_stale_is_told_with_its_facts_and_others_with_none() -> None:
    journal, drops = (it := Journal()), it.drops
    journal.append(leased("t1", "t2", "t3"))
    journal.append(accepted("t1"), accepted("t3"))
    journal.append({"type": "StepOpened", "groups": ["t3"]})
    assert drops.for_reason(None) == []
    journal.append(dropped("t1", "stale", "3 steps"))
    journal.append(dropped("t2", "quarantined", "cannot open rewards.py"))
    journal.append(dropped("e0.1", "quarantined"))
    (stale,) = drops.for_reason("stale")
    assert (stale["group_id"], stale["owner"], stale["dropped_t"]) == ("t1", "rollout-1", 4.0)
    assert (stale["tokens"], stale["reward_mean"], stale["max_version"]) == (90, 0.25, 4)
    (given_up,) = drops.for_reason("quarantined")
    assert "sequences" not in given_up and given_up["owner"] == "rollout-1"
    assert drops.reason_of("t2") == "quarantined" and drops.reason_of("t3") is None


def test_a_group_that_left_its_step_is_told_with_its_lengths() -> None:
    journal, drops = (it := Journal()), it.drops
    journal.append(leased("t1", "t2"), accepted("t1"), accepted("t2"))
    journal.append({"type": "StepOpened", "groups": ["t1", "t2"]})
    large = {"sequences": 2, "tokens": 90, "prompt_tokens": 30, "lengths": [10, 870]}
    journal.append({**dropped("t1", "out_of_memory", "p0: 80 GiB"), "group": large})
    journal.append({"type": "StepOpened", "groups": ["t2"]}, {"type": "StepCommitted"})
    journal.append(dropped("t2", "run_ended"))
    (told,) = drops.for_reason("out_of_memory")
    assert (told["tokens"], told["lengths"], told["owner"]) == (90, [40, 900], "rollout-1")
    (late,) = drops.for_reason("run_ended")
    assert "sequences" not in late, "trained: nothing is remembered of it"


def test_one_reason_does_not_crowd_out_another_and_memory_is_bounded() -> None:
    journal, drops = (it := Journal()), it.drops
    journal.append(dropped("t0", "stale"))
    journal.append(*(dropped(f"t{n}", "run_ended") for n in range(1, MOST + 50)))
    assert len(drops.for_reason(None)) == MOST + 1 and len(drops.for_reason("stale")) == 1
    assert not drops.accepted and not drops.owners
