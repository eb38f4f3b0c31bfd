"""``summary.json``: the result of a run, for success and failure. Means and rates come from the run
files; samples and faults come from a replay of the journal. A figure that could not be measured is
null, never a guess."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.observe.projection import Projection
from paceline.process.files import replace_file

FIRST_LAST = 5
TIME_SPLIT = ("generate", "reward", "wait", "compute", "reduce", "commit", "publish")


def summarise(
    run: Projection,
    *,
    status: str,
    reason: str = "",
    wall_s: float | None = None,
    group_size: int = 1,
    counts: Mapping[str, Any] | None = None,
    problems: Sequence[str] = (),
    faults: Mapping[str, Any] | None = None,
    export: str | None = None,
) -> dict[str, Any]:
    """The fields of summary.json. ``status``: finished, failed or interrupted. ``counts``,
    ``problems`` and ``faults``: those of the replayed journal; ``counts`` and ``faults`` are None
    if it could not be read."""

    def column(name: str) -> list[float]:
        return [value for _, value in run.metrics.column(name)]

    checkpoints, best = run.history.checkpoints, run.history.best
    rewards = column("reward_mean")
    # Recorded data has a held-out loss in the place of a reward.
    scores = [row.get("eval_loss", row["eval_reward_mean"]) for row in run.evals]
    scored = [
        (row, score) for row, score in zip(run.evals, scores, strict=True) if score is not None
    ]

    def counted(name: str, times: int = 1) -> int | None:
        return None if counts is None else int(counts.get(name, 0)) * times

    return {
        "status": status,
        "reason": reason,
        "steps": run.history.step,
        "checkpoint_step": checkpoints[-1].step if checkpoints else 0,
        "reward_first5": _mean(rewards[:FIRST_LAST]),
        "reward_last5": _mean(rewards[-FIRST_LAST:]),
        "eval_first": scored[0][1] if scored else None,
        "eval_last": scored[-1][1] if scored else None,
        "eval_sets": _newest_of_sets(run.evals),
        "eval_last_count": scored[-1][0]["eval_count"] if scored else None,
        "best_checkpoint_step": best.step if best else None,
        "best_checkpoint_eval": best.reward_mean if best else None,
        "evals_without_scores": sum(not _has_score(row) for row in run.evals),
        "samples_trained": counted("trained", group_size),
        "groups_dropped": None if counts is None else dict(counts.get("dropped", {})),
        "prompts_truncated": int(sum(column("prompts_truncated"))),
        "samples_lost": counted("lost", group_size),
        "samples_duplicated": counted("duplicates", group_size),
        "ledger_ok": None if counts is None else not problems,
        "ledger_problems": None if counts is None else list(problems),
        "max_staleness": max(column("staleness_max"), default=None),
        "late_share": _mean(column("late_share")),
        "masked_share": _mean(column("masked_share")),
        "dropped_share": _mean(column("dropped_share")),
        "ess": _mean(column("ess")),
        "samples_per_s": _rate(run, "samples"),
        "tokens_per_s": _rate(run, "tokens"),
        "controller_failovers": counted("failovers"),
        "mesh_rebuilds": counted("mesh_rebuilds"),
        "rollbacks": counted("rollbacks"),
        "faults": None if faults is None else dict(faults),
        "logprob_gap_max": max(column("logprob_gap_max"), default=None),
        "logprob_gap_fresh_max": max(column("logprob_gap_fresh_max"), default=None),
        "time_split_s": {
            name: _mean(values) for name in TIME_SPLIT if (values := column(f"time_{name}_s"))
        },
        "wall_s": None if wall_s is None else round(wall_s, 3),
        "export": export,
    }


def _newest_of_sets(evals: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By evaluation set: step and metrics of its newest evaluation."""
    found: dict[str, dict[str, Any]] = {}
    for row in evals:
        fresh: dict[str, dict[str, Any]] = {}
        for column, value in row.items():
            name, slash, metric = column.removeprefix("eval_").partition("/")
            if slash:
                fresh.setdefault(name, {"step": row["step"]})[metric] = value
        found |= {name: each for name, each in fresh.items() if "reward" in each}
    return found


def _has_score(row: Mapping[str, Any]) -> bool:
    """Return True if any set of the round has a reward, or recorded data a loss. A round may
    lack the set that ranks checkpoints."""
    rewards = (value for name, value in row.items() if name.endswith("/reward"))
    if row.get("eval_loss") is not None:
        return True
    return row["eval_reward_mean"] is not None or any(value is not None for value in rewards)


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    replace_file(run_dir / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary in ``run_dir``; None if there is none."""
    try:
        value = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def can_extend(summary: Mapping[str, Any] | None, steps: Callable[[], int]) -> bool:
    """Return True if the run ended with its last step, and may go on to ``steps``."""
    if summary is None or summary.get("status") != "finished" or summary.get("reason"):
        return False
    return steps() > int(summary.get("steps") or 0)


def _rate(run: Projection, name: str) -> float | None:
    """Units per second between the first commit and the last, without start-up and without the
    time that a run was stopped before it was resumed."""
    rows = run.metrics.rows(0, len(run.metrics))
    if not rows:
        return None
    units = elapsed = 0.0
    for before, row in pairwise(rows):
        if not any(before["t"] < t <= row["t"] for t in run.history.resumed):
            units += row.get(name) or 0
            elapsed += row["t"] - before["t"]
    if elapsed <= 0:
        seconds = rows[-1].get("step_s") or 0
        return (rows[-1].get(name) or 0) / seconds if seconds > 0 else None
    return units / elapsed


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
