"""A prompt whose reward kills its process, or never ends, costs itself and nothing else."""

import json
from pathlib import Path

import pytest

from testbed.fleets.local_run import write_run
from testbed.rewards import HANGS, KILLS
from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.long
def test_rewards_that_kill_their_process_or_hang_are_quarantined(
    start: Start, tmp_path: Path
) -> None:
    write_run(
        tmp_path,
        data={"shuffle": False, "eval_path": str(tmp_path / "held_out.jsonl")},
        reward={"functions": ["testbed.rewards:poison"], "processes": 2, "timeout_s": 1.0},
        fleet={"controllers": 1, "policy": 1, "rollout": 1},
    )
    path = tmp_path / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, answer in zip(rows[2:], (KILLS, HANGS), strict=False):
        row["answer"] = answer
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    up = start()
    assert up.wait() == 0, up.said()
    up.assert_sound(steps=6)
    dropped = [e for e in up.events("TaskDropped") if e["reason"] == "quarantined"]
    assert sorted(e["task_id"] for e in dropped) == ["t2", "t3"]
    assert {e["attempt"] for e in dropped} == {3}, "after fleet.max_attempts tries"
    assert all(e["detail"] for e in dropped), "with the reason of every try"
    assert up.events("WorkerDied") == [], "no worker died of it"
