"""The summary says what the files say, also of a run that stepped back or failed."""

import json
from pathlib import Path
from typing import Any

from paceline.observe.projection import Projection
from paceline.observe.runs import summarise


def write(run_dir: Path, events: list[dict], metrics: list[dict]) -> Projection:
    """``metrics``: of the committed steps, by their number, and evaluations."""
    steps = {row["step"]: row for row in metrics if row["kind"] == "step"}
    lines = []
    for event in events:
        row = steps.get(event.get("step"), {}) if event["type"] == "StepCommitted" else {}
        values = {name: value for name, value in row.items() if name not in ("kind", "t")}
        lines.append({**event, **({"t": row["t"], "metrics": values} if row else {})})
    lines += [
        {
            "type": "EvalRecorded",
            "step": row["step"],
            "t": row["t"],
            "reward_mean": row["eval_reward_mean"],
            "count": row.get("eval_count", 0),
        }
        for row in metrics
        if row["kind"] == "eval"
    ]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Projection.read(run_dir)


def step(number: int, reward: float, **more: float) -> dict:
    return {"kind": "step", "step": number, "t": float(number), "reward_mean": reward, **more}


def committed(number: int) -> dict:
    return {"type": "StepCommitted", "step": number}


def summary_of(records: Projection, counts: dict[str, Any] | None = None) -> dict:
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
    records = write(
        tmp_path,
        [committed(n) for n in range(1, 11)],
        [
            {"kind": "eval", "step": 0, "t": 0.0, "eval_reward_mean": 0.5},
            *(step(n, n / 10, samples=64, tokens=640, staleness_max=n % 3) for n in range(1, 11)),
            {"kind": "eval", "step": 10, "t": 11.0, "eval_reward_mean": 0.9},
        ],
    )
    counts = {"trained": 80, "dropped": {"stale": 2}}
    faults = {"failovers": 1, "mesh_rebuilds": 2, "rollbacks": 3}
    found = summary_of(records, {**counts, **faults})
    assert found["steps"] == 10
    assert found["reward_first5"] == 0.3
    assert found["reward_last5"] == 0.8
    assert (found["eval_first"], found["eval_last"]) == (0.5, 0.9)
    assert found["samples_per_s"] == 64
    assert found["tokens_per_s"] == 640
    assert found["max_staleness"] == 2
    assert found["controller_failovers"] == 1
    assert (found["mesh_rebuilds"], found["rollbacks"]) == (2, 3)
    assert found["samples_trained"] == 640
    assert found["groups_dropped"] == {"stale": 2}


def test_a_journal_that_could_not_be_read_is_no_zero(tmp_path: Path) -> None:
    found = summary_of(write(tmp_path, [committed(1)], [step(1, 0.5)]))
    for name in ("controller_failovers", "mesh_rebuilds", "rollbacks", "samples_lost", "ledger_ok"):
        assert found[name] is None, name


def test_the_time_that_a_run_lay_still_is_no_part_of_its_pace(tmp_path: Path) -> None:
    who = {"worker_id": "policy-0", "pid": 1, "host": "a"}
    found = summary_of(
        write(
            tmp_path,
            [
                {"type": "TermBegun", "t": 0.0},
                {"type": "WorkerRegistered", **who, "t": 0.5},
                *(committed(n) for n in (1, 2, 3)),
                {"type": "WorkerDied", **who, "incarnation": 1, "cause": "killed", "t": 3.5},
                {"type": "TermBegun", "t": 90_000.0},
                {"type": "WorkerRegistered", **who, "t": 90_001.0},
                *(committed(n) for n in (4, 5)),
            ],
            [
                *(step(n, 0.5, samples=64) for n in (1, 2, 3)),
                *({**step(n, 0.5, samples=64), "t": 90_000.0 + n} for n in (4, 5)),
            ],
        )
    )
    assert found["samples_per_s"] == 64


def test_an_evaluation_without_a_score_is_no_reward_of_zero(tmp_path: Path) -> None:
    found = summary_of(
        write(
            tmp_path,
            [committed(1)],
            [
                {"kind": "eval", "step": 0, "t": 0.0, "eval_reward_mean": None, "eval_count": 0.0},
                {"kind": "eval", "step": 1, "t": 1.0, "eval_reward_mean": 0.5, "eval_count": 7.0},
                {"kind": "eval", "step": 2, "t": 2.0, "eval_reward_mean": None, "eval_count": 0.0},
            ],
        )
    )
    assert (found["eval_first"], found["eval_last"]) == (0.5, 0.5)
    assert (found["eval_last_count"], found["evals_without_scores"]) == (7.0, 2)


def test_steps_that_were_rolled_back_do_not_count(tmp_path: Path) -> None:
    records = write(
        tmp_path,
        [
            committed(1),
            {"type": "CheckpointRecorded", "step": 1, "path": "c1"},
            committed(2),
            {"type": "CheckpointRecorded", "step": 2, "path": "c2"},
            {"type": "RolledBack", "step": 1, "checkpoint_path": "c1"},
        ],
        [step(1, 0.1), step(2, 0.9)],
    )
    assert summary_of(records)["steps"] == 1
    assert summary_of(records)["reward_last5"] == 0.1
    assert [c.path for c in records.history.checkpoints] == ["c1"]


def test_a_run_that_failed_before_its_first_step_has_a_summary(tmp_path: Path) -> None:
    found = summary_of(Projection.read(tmp_path))
    assert found["steps"] == 0
    assert found["samples_lost"] is None
    assert found["reward_first5"] is None
    json.dumps(found, allow_nan=False)
