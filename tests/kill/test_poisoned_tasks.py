"""A prompt whose reward kills its process, or never ends, costs itself and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.local_run import Up, write_run
from tests.helpers.poison_reward import HANGS, KILLS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def poisoned(tmp_path: Path, answers: list[str], processes: int) -> Up:
    config = write_run(
        tmp_path,
        data={"shuffle": False, "eval_path": str(tmp_path / "held_out.jsonl")},
        reward={
            "functions": ["tests.helpers.poison_reward:scored"],
            "processes": processes,
            "timeout_s": 1.0,
        },
        fleet={"controllers": 1, "policy": 1, "rollout": 2},
    )
    path = tmp_path / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, answer in zip(rows[2:], answers, strict=False):
        row["answer"] = answer
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Up(config, tmp_path / "run")


def quarantined(up: Up) -> dict[str, str]:
    """Task to the reasons of its tries, once the run is known to be sound."""
    summary = up.summary()
    assert summary["status"] == "finished" and summary["steps"] == 6
    assert summary["ledger_ok"] is True, summary["ledger_problems"]
    assert summary["samples_lost"] == summary["samples_duplicated"] == 0
    dropped = {e["task_id"]: e for e in up.events("TaskDropped") if e["reason"] == "quarantined"}
    assert {e["attempt"] for e in dropped.values()} == {3}, "after fleet.max_attempts tries"
    return {task: e["detail"] for task, e in dropped.items()}


def test_rewards_that_kill_their_process_or_hang_are_quarantined(tmp_path: Path) -> None:
    up = poisoned(tmp_path, [KILLS, HANGS], processes=2)
    try:
        assert up.wait() == 0, up.said()
        dropped = quarantined(up)
        assert sorted(dropped) == ["t2", "t3"]
        assert all(dropped.values()), "named, with the reason of every try"
        assert up.events("WorkerDied") == [], "no worker died of it"
    finally:
        up.close()


@pytest.mark.slow
def test_a_reward_that_kills_the_whole_worker_ends_in_quarantine_too(tmp_path: Path) -> None:
    """Tasks that were held together with the poisoned one may be quarantined with it: whose fault a
    worker's death was cannot be told. reward.processes >= 1, the default, prevents it."""
    up = poisoned(tmp_path, [KILLS], processes=0)
    try:
        assert up.wait() == 0, up.said()
        assert "t2" in quarantined(up)
        died = [e["worker_id"] for e in up.events("WorkerDied")]
        assert len(died) >= 3 and set(died) <= {"rollout-0", "rollout-1"}
    finally:
        up.close()
