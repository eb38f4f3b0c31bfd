"""A group that no trainer survives, and one that does not fit into memory, cost themselves and no
step."""

import json
import os

import pytest

from testbed.fleets.local_run import ROOT
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
