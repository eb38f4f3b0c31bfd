"""The summary says what the files say, also of a run that stepped back or failed."""

import json
from pathlib import Path
from typing import Any

from paceline.observe.projection import Projection
from paceline.observe.runs import summarise
from tests.fixtures.event_files import write_events


def write(run_dir: Path, *events: dict[str, Any]) -> Projection:
    write_events(run_dir, *events)
    return Projection.read(run_dir)


def committed(step: int, reward: float = 0.5, since: float = 0.0, **more: float) -> dict[str, Any]:
    """A step at ``step`` seconds after ``since``."""
    metrics = {"reward_mean": reward, **more}
    return {"type": "StepCommitted", "step": step, "t": since + step, "metrics": metrics}


def evaluated(step: int, reward: float | None, count: float = 0.0) -> dict[str, Any]:
    scores = {"reward_mean": reward, "count": count}
    return {"type": "EvalRecorded", "step": step, "t": float(step), **scores}


def summary_of(records: Projection, counts: dict[str, Any] | None = None) -> dict[str, Any]:
    return summarise(
        records,
        status="finished",
        reason="",
        wall_s=1.0,
        group_size=8,
        counts=counts,
        export=None,
    )


def test_rewards_rates_and_faults(tmp_path: Path) -> None:
    steps = [
        committed(n, n / 10, samples=64, tokens=640, staleness_max=n % 3) for n in range(1, 11)
    ]
    records = write(tmp_path, *steps, evaluated(0, 0.5), evaluated(10, 0.9))
    counts = {"trained": 80, "dropped": {"stale": 2}}
    faults = {"failovers": 1, "mesh_rebuilds": 2, "rollbacks": 3}
    found = summary_of(records, {**counts, **faults})
    expected = {
        "steps": 10,
        "reward_first5": 0.3,
        "reward_last5": 0.8,
        "eval_first": 0.5,
        "eval_last": 0.9,
        "samples_per_s": 64,
        "tokens_per_s": 640,
        "max_staleness": 2,
        "controller_failovers": 1,
        "mesh_rebuilds": 2,
        "rollbacks": 3,
        "samples_trained": 640,
        "groups_dropped": {"stale": 2},
    }
    assert {name: found[name] for name in expected} == expected


def test_a_journal_that_could_not_be_read_is_no_zero(tmp_path: Path) -> None:
    found = summary_of(write(tmp_path, committed(1)))
    for name in ("controller_failovers", "mesh_rebuilds", "rollbacks", "samples_lost", "ledger_ok"):
        assert found[name] is None, name


def test_the_time_that_a_run_lay_still_is_no_part_of_its_pace(tmp_path: Path) -> None:
    who = {"worker_id": "policy-0", "pid": 1, "host": "a"}
    records = write(
        tmp_path,
        {"type": "TermBegun", "t": 0.0},
        {"type": "WorkerRegistered", **who, "t": 0.5},
        *(committed(n, samples=64) for n in (1, 2, 3)),
        {"type": "WorkerDied", **who, "incarnation": 1, "cause": "killed", "t": 3.5},
        {"type": "TermBegun", "t": 90_000.0},
        {"type": "WorkerRegistered", **who, "t": 90_001.0},
        *(committed(n, since=90_000.0, samples=64) for n in (4, 5)),
    )
    assert summary_of(records)["samples_per_s"] == 64


def test_an_evaluation_without_a_score_is_no_reward_of_zero(tmp_path: Path) -> None:
    scores = evaluated(0, None), evaluated(1, 0.5, 7.0), evaluated(2, None)
    found = summary_of(write(tmp_path, committed(1), *scores))
    assert (found["eval_first"], found["eval_last"]) == (0.5, 0.5)


def test_steps_that_were_rolled_back_do_not_count(tmp_path: Path) -> None:
    records = write(
        tmp_path,
        committed(1, 0.1),
        {"type": "CheckpointRecorded", "step": 1, "path": "c1"},
        committed(2, 0.9),
        {"type": "CheckpointRecorded", "step": 2, "path": "c2"},
        {"type": "RolledBack", "step": 1, "checkpoint_path": "c1"},
    )
    assert summary_of(records)["steps"] == 1
    assert summary_of(records)["reward_last5"] == 0.1
    assert [c.path for c in records.checkpoints.saved] == ["c1"]


def test_a_run_that_failed_before_its_first_step_has_a_summary(tmp_path: Path) -> None:
    found = summary_of(Projection.read(tmp_path))
    assert (found["steps"], found["samples_lost"], found["reward_first5"]) == (0, None, None)
    json.dumps(found, allow_nan=False)
