"""A prompt whose reward kills its process, or never ends, costs itself and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.fleets.local_run import Up, write_run
from testbed.rewards import HANGS, KILLS
from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def poisoned(
    start: Start,
    tmp_path: Path,
    answers: list[str],
    processes: int,
    *,
    rows: int = 64,
    steps: int = 6,
    rollout: int = 2,
) -> Up:
    write_run(
        tmp_path,
        rows=rows,
        train={"steps": steps},
        data={"shuffle": False, "eval_path": str(tmp_path / "held_out.jsonl")},
        reward={
            "functions": ["testbed.rewards:poison"],
            "processes": processes,
            "timeout_s": 1.0,
        },
        fleet={"controllers": 1, "policy": 1, "rollout": rollout},
    )
    path = tmp_path / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, answer in zip(rows[2:], answers, strict=False):
        row["answer"] = answer
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return start()


def quarantined(up: Up) -> dict[str, dict[str, Any]]:
    """The event by task."""
    return {e["task_id"]: e for e in up.events("TaskDropped") if e["reason"] == "quarantined"}


@pytest.mark.long
def test_rewards_that_kill_their_process_or_hang_are_quarantined(
    start: Start, tmp_path: Path
) -> None:
    up = poisoned(start, tmp_path, [KILLS, HANGS], processes=2, rollout=1)
    assert up.wait() == 0, up.said()
    up.assert_sound(steps=6)
    dropped = quarantined(up)
    assert sorted(dropped) == ["t2", "t3"]
    assert {e["attempt"] for e in dropped.values()} == {3}, "after fleet.max_attempts tries"
    assert all(e["detail"] for e in dropped.values()), "with the reason of every try"
    assert up.events("WorkerDied") == [], "no worker died of it"


@pytest.mark.slow
def test_a_reward_that_kills_the_whole_worker_costs_itself_and_no_innocent(
    start: Start, tmp_path: Path
) -> None:
    """With reward.processes = 0 the worker dies with everything it holds, whoever was the
    reason."""
    up = poisoned(start, tmp_path, [KILLS], processes=0, rows=20_000, steps=100_000)
    up.until(lambda: quarantined(up))
    after = up.step()
    up.until(lambda: up.step() >= after + 3)
    # Routine events, too.
    events = map(json.loads, up.command("events", "--all", "--json").splitlines())
    released = [e for e in events if e["type"] == "TaskReleased"]
    up.command("stop")
    assert up.wait() == 0, up.said()
    up.assert_sound()
    (condemned,) = quarantined(up).values()
    assert condemned["task_id"] == "t2"
    assert condemned["detail"].count("owner_died") == 3, "fleet.max_attempts deaths it was alone in"
    died = [e["worker_id"] for e in up.events("WorkerDied")]
    assert len(died) >= 3 and set(died) <= {"rollout-0", "rollout-1"}
    assert {e["task_id"] for e in released if e["counts"]} == {"t2"}, "no try against another"
    suspected = {e["task_id"] for e in released if e["suspected"]}
    assert len(suspected) > 1, "others were held together with it"
