"""A real fleet with a spare rollout worker, whose working one is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.fleets.local_run import Up, paceline, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


def warm(up: Up) -> list[str]:
    """Spares that serve weights."""
    workers = up.status()["workers"]
    return [
        w["worker_id"] for w in workers if w["state"] == "spare" and int(w.get("version", 0)) >= 0
    ]


def test_a_spare_begins_with_its_weights_loaded_when_the_working_one_is_killed(
    tmp_path: Path,
) -> None:
    """Not slow, with protocol-only workers: tests/process/controller/test_standing_by.py."""
    config = write_run(
        tmp_path,
        train={"steps": 1000, "checkpoint_every": 1000, "eval_every": 1000},
        fleet={"policy": 1, "rollout": 1, "rollout_spares": 1},
    )
    up = Up(config, tmp_path / "run")
    try:
        up.until(lambda: up.step() >= 2 and warm(up))
        (spare,) = warm(up)
        (working,) = {"rollout-0", "rollout-1"} - {spare}
        up.kill(working)
        up.until(lambda: warm(up) == [working])
        step = up.step()
        up.until(lambda: up.step() > step)
        found = paceline("events", "--all", "--json", "--run-dir", str(up.run_dir))
        events = [json.loads(line) for line in found.stdout.splitlines()]
        died = next(
            i
            for i, e in enumerate(events)
            if e["type"] == "WorkerDied" and e["worker_id"] == working
        )
        after = [e for e in events[died:] if e["type"] in ("SpareSet", "TasksLeased")]
        assert after[0] == {**after[0], "type": "SpareSet", "worker_id": spare, "spare": False}
        assert after[1]["worker_id"] == spare, "the one started anew stands by"
        replaced = [e for e in events[died:] if e["type"] == "WorkerRegistered"]
        assert [(e["worker_id"], e["spare"]) for e in replaced] == [(working, True)]
        assert paceline("stop", "--run-dir", str(up.run_dir)).returncode == 0
        assert up.wait() == 0
        checked = paceline("ledger", "verify", "--run-dir", str(up.run_dir))
        assert checked.returncode == 0, checked.stdout + checked.stderr
    finally:
        up.close()
