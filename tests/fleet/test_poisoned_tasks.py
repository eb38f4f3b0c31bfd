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


def doomed(fates: dict[str, str]) -> dict[str, str]:
    """Environment of a fleet in which the groups of these tasks have such a fate."""
    paths = [str(ROOT / "testbed" / "doomed"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PACELINE_DOOMED": json.dumps(fates),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def test_each_of_them_leaves_and_the_run_ends_well(start: Start, tmp_path: Path) -> None:
    write_run(
        tmp_path,
        data={"shuffle": False, "eval_path": str(tmp_path / "held_out.jsonl")},
        reward={"functions": ["testbed.rewards:poison"], "processes": 2, "timeout_s": 1.0},
        fleet={"controllers": 1, "policy": 2, "rollout": 1, "max_attempts": 2},
    )
    path = tmp_path / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, answer in zip(rows[2:], (KILLS, HANGS), strict=False):
        row["answer"] = answer
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    up = start(environment=doomed({"t4": "kill", "t9": "memory"}))
    assert up.wait(360) == 0, up.said()
    up.assert_sound(steps=6)
    dropped = {e["task_id"]: e for e in up.events("TaskDropped")}
    assert {t: e["reason"] for t, e in dropped.items()} == {
        "t2": "quarantined",
        "t3": "quarantined",
        "t4": "killed_trainers",
        "t9": "out_of_memory",
    }
    for event in dropped["t2"], dropped["t3"]:
        assert event["attempt"] == 2, "after fleet.max_attempts tries"
        assert event["detail"], "with the reason of every try"
    for event in dropped["t4"], dropped["t9"]:
        lengths = event["group"]["lengths"]
        assert len(lengths) == 4 and min(lengths) >= 1
    assert "80.00 GiB" in dropped["t9"]["detail"]
    died = [e["worker_id"] for e in up.events("WorkerDied")]
    assert len(died) == 2 and set(died) <= {"policy-0", "policy-1"}, "fleet.max_attempts deaths"
