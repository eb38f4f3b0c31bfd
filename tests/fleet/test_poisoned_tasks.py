"""A prompt whose reward kills its process or never ends, a group that no trainer survives, and one
that does not fit into memory: each costs itself and nothing else."""

import json
import os
from pathlib import Path

import pytest

from testbed.fleets.local_run import ROOT, write_run
from testbed.rewards import HANGS, KILLS
from tests.fleet.conftest import Start

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(400)]


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


def doomed(fates: dict[str, str]) -> dict[str, str]:
    """Environment of a fleet in which the groups of these tasks have such a fate."""
    paths = [str(ROOT / "testbed" / "doomed"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PACELINE_DOOMED": json.dumps(fates),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def test_groups_that_kill_trainers_or_exceed_their_memory_leave_and_the_run_ends_well(
    start: Start,
) -> None:
    fleet = {"controllers": 1, "policy": 2, "rollout": 1, "max_attempts": 2}
    up = start(environment=doomed({"t2": "kill", "t9": "memory"}), fleet=fleet)
    assert up.wait(360) == 0, up.said()
    up.assert_sound(steps=6)
    dropped = {e["task_id"]: e for e in up.events("TaskDropped")}
    assert {t: e["reason"] for t, e in dropped.items()} == {
        "t2": "killed_trainers",
        "t9": "out_of_memory",
    }
    lengths = [e["group"]["lengths"] for e in dropped.values()]
    assert all(len(each) == 4 and min(each) >= 1 for each in lengths)
    assert "80.00 GiB" in dropped["t9"]["detail"]
    died = [e["worker_id"] for e in up.events("WorkerDied")]
    assert len(died) == 2 and set(died) <= {"policy-0", "policy-1"}, "fleet.max_attempts deaths"
