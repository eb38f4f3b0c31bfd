"""Dropped groups are folded from the journal, with what it says of them."""

from typing import Any

from paceline.observe.groups import MOST, DroppedGroups

FACTS = {"sequences": 2, "tokens": 90, "reward_mean": 0.25, "reward_std": 0.4, "reward_max": 1.0}
GROUP = {**FACTS, "min_version": 3, "max_version": 4, "prompt_tokens": 30, "lengths": [10, 870]}


def drops_of(*events: dict[str, Any]) -> DroppedGroups:
    """From a journal whose entries are a second apart."""
    drops = DroppedGroups()
    for t, event in enumerate(events):
        drops.take(float(t), "TaskDropped", event)
    return drops


def dropped(task_id: str, reason: str, **more: Any) -> dict[str, Any]:
    return {"task_id": task_id, "attempt": 1, "reason": reason, **more}


def test_a_generated_group_is_told_with_its_facts_and_lengths_and_others_with_none() -> None:
    drops = drops_of(
        dropped("t1", "out_of_memory", detail="p0: 80 GiB", group=GROUP),
        dropped("t2", "quarantined", detail="cannot open rewards.py"),
        dropped("e0.1", "quarantined"),
    )
    (large,) = drops.for_reason("out_of_memory")
    assert large.items() >= {**FACTS, "group_id": "t1", "dropped_t": 0.0}.items()
    assert (large["lengths"], large["detail"]) == ([40, 900], "p0: 80 GiB")
    (given_up,) = drops.for_reason("quarantined")
    assert "sequences" not in given_up
    assert drops.reason_of("t2") == "quarantined" and drops.reason_of("t3") is None


def test_one_reason_does_not_crowd_out_another_and_memory_is_bounded() -> None:
    many = (dropped(f"t{n}", "run_ended") for n in range(1, MOST + 50))
    drops = drops_of(dropped("t0", "stale"), *many)
    assert len(drops.for_reason(None)) == MOST + 1 and len(drops.for_reason("stale")) == 1
