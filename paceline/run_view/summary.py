"""``summary.json``: what a run came to, on success and on failure, from its own files.

Means and rates come from metrics.jsonl, faults from events.jsonl, and the accounting of samples from
a replay of the journal. What could not be measured is null, never a guess.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.run_view.json_lines import read_lines

FIRST_LAST = 5


@dataclass(frozen=True, slots=True)
class Accounting:
    """Counts of a replayed journal, in groups."""

    ok: bool
    trained: int
    lost: int
    duplicated: int
    dropped: Mapping[str, int]
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class Story:
    """A run as its files tell it; rows of steps that were rolled back are superseded."""

    steps: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    evals: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    events: list[Mapping[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, run_dir: Path) -> Story:
        story = cls(events=list(read_lines(run_dir / "events.jsonl")))
        for row in read_lines(run_dir / "metrics.jsonl"):
            kept = story.steps if row.get("kind", "step") == "step" else story.evals
            kept[int(row["step"])] = row
        last = story.last_step
        story.steps = {step: row for step, row in story.steps.items() if step <= last}
        return story

    @property
    def last_step(self) -> int:
        """Step the surviving line ends with."""
        step = 0
        for event in self.events:
            if event["type"] in ("StepCommitted", "RolledBack"):
                step = int(event["step"])
        return step

    def column(self, name: str) -> list[float]:
        """Finite values of a metric in order of steps."""
        values = (self.steps[step].get(name) for step in sorted(self.steps))
        return [float(v) for v in values if v is not None and math.isfinite(v)]

    def count(self, kind: str) -> int:
        return sum(event["type"] == kind for event in self.events)

    @property
    def failovers(self) -> int:
        """Leaders that took over a fleet at work, as the ledger counts them: a run that was stopped
        with all its workers and is resumed has a new leader, too."""
        return sum(at_work for _, at_work in self._terms())

    @property
    def resumed(self) -> list[float]:
        """When a leader began that found nobody at work: at the start, and when a run that had been
        stopped went on. Unix seconds, ascending."""
        return [t for t, at_work in self._terms() if not at_work]

    def _terms(self) -> Iterator[tuple[float, bool]]:
        """Of each term when it began, and whether anybody was at work then."""
        living: set[str] = set()
        for event in self.events:
            kind = event["type"]
            if kind == "WorkerRegistered":
                living.add(str(event["worker_id"]))
            elif kind == "WorkerDied" or event.get("lifecycle") == "stopped":
                living.discard(str(event.get("worker_id")))
            elif kind == "TermBegun":
                yield float(event.get("t", 0.0)), bool(living)

    @property
    def mesh_rebuilds(self) -> int:
        """Mesh epochs formed because the one before broke, as the ledger counts them: a replica that
        joins or leaves between steps breaks nothing."""
        found, due = 0, False
        for event in self.events:
            if event["type"] == "MeshBroken":
                due = due or event.get("reason") != "membership"
            elif event["type"] == "MeshFormed":
                found, due = found + due, False
        return found

    @property
    def newest_checkpoint(self) -> str | None:
        """Path of the newest recorded checkpoint that the surviving line has not left."""
        path, at = None, -1
        for event in self.events:
            if event["type"] == "CheckpointRecorded":
                path, at = str(event["path"]), int(event["step"])
            elif event["type"] == "RolledBack" and at > int(event["step"]):
                path, at = str(event.get("checkpoint_path") or "") or None, int(event["step"])
        return path


def summarise(
    story: Story,
    *,
    status: str,
    reason: str,
    wall_s: float,
    group_size: int,
    accounting: Accounting | None,
    export: str | None,
) -> dict[str, Any]:
    """The fields of summary.json. ``status``: finished, failed or interrupted.

    ``accounting``: None where the journal could not be read.
    """
    rewards = story.column("reward_mean")
    rounds = [story.evals[step] for step in sorted(story.evals)]
    scored = [row for row in rounds if row.get("eval_reward_mean") is not None]
    trained = accounting.trained if accounting else None
    return {
        "status": status,
        "reason": reason,
        "steps": story.last_step,
        "reward_first5": _mean(rewards[:FIRST_LAST]),
        "reward_last5": _mean(rewards[-FIRST_LAST:]),
        "eval_first": scored[0]["eval_reward_mean"] if scored else None,
        "eval_last": scored[-1]["eval_reward_mean"] if scored else None,
        "eval_last_count": scored[-1].get("eval_count") if scored else None,
        "evals_without_scores": len(rounds) - len(scored),
        "samples_trained": None if trained is None else trained * group_size,
        "groups_dropped": dict(accounting.dropped) if accounting else None,
        "samples_lost": accounting.lost * group_size if accounting else None,
        "samples_duplicated": accounting.duplicated * group_size if accounting else None,
        "ledger_ok": accounting.ok if accounting else None,
        "ledger_problems": list(accounting.problems) if accounting else None,
        "max_staleness": _largest(story.column("staleness_max")),
        "samples_per_s": _rate(story, "samples"),
        "tokens_per_s": _rate(story, "tokens"),
        "controller_failovers": story.failovers,
        "mesh_rebuilds": story.mesh_rebuilds,
        "rollbacks": story.count("RolledBack"),
        "logprob_gap_max": _largest(story.column("logprob_gap_max")),
        "logprob_gap_fresh_max": _largest(story.column("logprob_gap_fresh_max")),
        "time_split_s": {
            name: _mean(values)
            for name in ("generate", "reward", "wait", "compute", "reduce", "commit", "publish")
            if (values := story.column(f"time_{name}_s"))
        },
        "wall_s": round(wall_s, 3),
        "export": export,
    }


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    path = run_dir / "summary.json"
    fresh = path.with_name(f".summary.json.{os.getpid()}")
    fresh.write_text(json.dumps(summary, indent=2) + "\n")
    fresh.replace(path)


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary in ``run_dir``; None where there is none."""
    try:
        value = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _rate(story: Story, name: str) -> float | None:
    """Units a second between the first commit and the last: start-up is no part of the pace, nor is
    the time that a run lay still before it was resumed."""
    steps = sorted(story.steps)
    if not steps:
        return None
    rows = [story.steps[step] for step in steps]
    resumed = story.resumed
    units = elapsed = 0.0
    for before, row in pairwise(rows):
        begun, ended = float(before["t"]), float(row["t"])
        if not any(begun < t <= ended for t in resumed):
            units += float(row.get(name) or 0)
            elapsed += ended - begun
    if elapsed <= 0:
        seconds = float(rows[-1].get("step_s") or 0)
        return float(rows[-1].get(name) or 0) / seconds if seconds > 0 else None
    return units / elapsed


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def _largest(values: list[float]) -> float | None:
    return max(values) if values else None
