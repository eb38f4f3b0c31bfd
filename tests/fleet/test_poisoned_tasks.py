"""A prompt whose reward kills its process, or never ends, costs itself and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.fleets.local_run import Up, paceline, write_run
from testbed.rewards import HANGS, KILLS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def poisoned(
    tmp_path: Path,
    answers: list[str],
    processes: int,
    *,
    rows: int = 64,
    steps: int = 6,
    rollout: int = 2,
) -> Up:
    config = write_run(
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
    return Up(config, tmp_path / "run")


def quarantined(up: Up) -> dict[str, dict[str, Any]]:
    """The event by task."""
    return {e["task_id"]: e for e in up.events("TaskDropped") if e["reason"] == "quarantined"}


def of_journal(up: Up, kind: str) -> list[dict[str, Any]]:
    """Every event of a kind so far, routine ones included."""
    shown = paceline("events", "--all", "--json", "--run-dir", str(up.run_dir))
    assert shown.returncode == 0, shown.stderr
    return [e for e in map(json.loads, shown.stdout.splitlines()) if e["type"] == kind]


def assert_sound(up: Up) -> None:
    summary = up.summary()
    assert summary["status"] == "finished"
    assert summary["ledger_ok"] is True, summary["ledger_problems"]
    assert summary["samples_lost"] == summary["samples_duplicated"] == 0


@pytest.mark.long
def test_rewards_that_kill_their_process_or_hang_are_quarantined(tmp_path: Path) -> None:
    up = poisoned(tmp_path, [KILLS, HANGS], processes=2, rollout=1)
    try:
        assert up.wait() == 0, up.said()
        assert_sound(up)
        assert up.summary()["steps"] == 6
        dropped = quarantined(up)
        assert sorted(dropped) == ["t2", "t3"]
        assert {e["attempt"] for e in dropped.values()} == {3}, "after fleet.max_attempts tries"
        assert all(e["detail"] for e in dropped.values()), "with the reason of every try"
        assert up.events("WorkerDied") == [], "no worker died of it"
    finally:
        up.close()


@pytest.mark.slow
def test_a_reward_that_kills_the_whole_worker_costs_itself_and_no_innocent(tmp_path: Path) -> None:
    """With reward.processes = 0 the worker dies with everything it holds, whoever was the
    reason."""
    up = poisoned(tmp_path, [KILLS], processes=0, rows=20_000, steps=100_000)
    try:
        up.until(lambda: quarantined(up))
        after = up.step()
        up.until(lambda: up.step() >= after + 3)
        released = of_journal(up, "TaskReleased")
        stopped = paceline("stop", "--run-dir", str(up.run_dir))
        assert stopped.returncode == 0, stopped.stderr
        assert up.wait() == 0, up.said()
        assert_sound(up)
        (condemned,) = quarantined(up).values()
        assert condemned["task_id"] == "t2"
        assert condemned["detail"].count("owner_died") == 3, (
            "fleet.max_attempts deaths it was alone in"
        )
        died = [e["worker_id"] for e in up.events("WorkerDied")]
        assert len(died) >= 3 and set(died) <= {"rollout-0", "rollout-1"}
        assert {e["task_id"] for e in released if e["counts"]} == {"t2"}, "no try against another"
        suspected = {e["task_id"] for e in released if e["suspected"]}
        assert len(suspected) > 1, "others were held together with it"
    finally:
        up.close()
