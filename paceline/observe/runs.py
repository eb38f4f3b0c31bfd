"""Results of runs: ``summary.json``, for success and failure, and the runs in a directory tree.

Means and rates of a summary come from the run files; samples and faults come from a replay of the
journal. A figure that could not be measured is null, never a guess.
"""

from __future__ import annotations

import contextlib
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.changes import flat_settings
from paceline.errors import BadInput, plural
from paceline.masking import masked_settings
from paceline.observe.curves import HEAD
from paceline.observe.projection import Projection
from paceline.observe.run_files import DamagedFile
from paceline.process.files import NotOurs, replace_file

if TYPE_CHECKING:
    from paceline.v1 import admin_pb2

FIRST_LAST = 5
TIME_SPLIT = ("generate", "reward", "wait", "compute", "reduce", "commit", "publish")
UTILISATION = (
    *("trainer_busy", "engine_busy", "device_busy", "mfu"),
    *("tokens_per_s_device", "engine_tokens_per_s_device"),
)
DEPTH = 3
MARKS = ("summary.json", "events.jsonl", "config.toml")
"""A directory with one of these files is a run directory."""


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

    checkpoints, best = run.checkpoints.saved, run.checkpoints.best
    rewards = column("reward_mean")
    # Recorded data has a held-out loss in the place of a reward.
    scores = [row.get("eval_loss", row["eval_reward_mean"]) for row in run.evals]
    scored = [score for score in scores if score is not None]

    def counted(name: str, times: int = 1) -> int | None:
        return None if counts is None else int(counts.get(name, 0)) * times

    return {
        "status": status,
        "reason": reason,
        "steps": run.step,
        "checkpoint_step": checkpoints[-1].step if checkpoints else 0,
        "reward_first5": _mean(rewards[:FIRST_LAST]),
        "reward_last5": _mean(rewards[-FIRST_LAST:]),
        "eval_first": scored[0] if scored else None,
        "eval_last": scored[-1] if scored else None,
        "eval_sets": _newest_of_sets(run.evals),
        "eval_left_out": run.held_out.left_out,
        "best_checkpoint_step": best.step if best else None,
        "best_checkpoint_eval": best.reward_mean if best else None,
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
        "zero_variance_share": _mean(column("zero_variance_share")),
        "ess": _mean(column("ess")),
        "samples_per_s": _rate(run, "samples"),
        "tokens_per_s": _rate(run, "tokens"),
        "controller_failovers": counted("failovers"),
        "mesh_rebuilds": counted("mesh_rebuilds"),
        "rollbacks": counted("rollbacks"),
        "faults": None if faults is None else dict(faults),
        "utilisation": {name: _mean(values) for name in UTILISATION if (values := column(name))},
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
        for name in [column[5:-7] for column in row if column.endswith("/reward")]:
            head = f"eval_{name}/"
            metrics = {c.removeprefix(head): v for c, v in row.items() if c.startswith(head)}
            found[name] = {"step": row["step"], **metrics}
    return found


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    replace_file(run_dir / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary in ``run_dir``; None if there is none."""
    try:
        value = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def can_extend(run: Projection, steps: Callable[[], int]) -> bool:
    """Return True if the run ended with its last step, and may go on to ``steps``. Its events tell:
    a later start that failed has written another summary."""
    at_its_length = run.reason == "completed"
    return run.status == "finished" and at_its_length and steps() > run.step


def _rate(run: Projection, name: str) -> float | None:
    """Units per second between the first commit and the last, without start-up and without the
    time that a run was stopped before it was resumed."""
    rows = run.metrics.rows(0, len(run.metrics))
    if not rows:
        return None
    units = elapsed = 0.0
    for before, row in pairwise(rows):
        if not any(before["t"] < t <= row["t"] for t in run.resumed):
            units += row.get(name) or 0
            elapsed += row["t"] - before["t"]
    if elapsed <= 0:
        seconds = rows[-1].get("step_s") or 0
        return (rows[-1].get(name) or 0) / seconds if seconds > 0 else None
    return units / elapsed


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory. Rewards are means over steps, as in summary.json; None: unknown."""

    name: str
    path: Path
    state: str
    """running; finished, failed or interrupted; ended: not running and without a summary; damaged:
    its files cannot be read."""
    reason: str
    steps: int | None
    reward_first5: float | None
    reward_last5: float | None
    eval_first: float | None
    eval_last: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    max_staleness: float | None
    wall_s: float | None
    changed: float  # Unix seconds of the last line or summary written

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


NUMBERS = (
    *("reward_first5", "reward_last5", "eval_first", "eval_last"),
    *("samples_per_s", "tokens_per_s", "max_staleness", "wall_s"),
)


def find_runs(directory: Path) -> list[Run]:
    """Runs in ``directory``, itself included, and below it; the last changed first."""
    found = []
    for path in _places(directory, DEPTH):
        try:
            found.append(read_run(path))
        except (BadInput, OSError) as error:  # it must not hide the others
            unknown = dict.fromkeys(("steps", *NUMBERS))
            at = _changed(path)
            found.append(Run(path.name, path, "damaged", str(error), changed=at, **unknown))
    return sorted(found, key=lambda run: -run.changed)


def settings_that_differ(run_dirs: Sequence[Path]) -> dict[str, list[Any]]:
    """Settings of config.toml that differ, with their value in each run; None: not set."""

    def read(path: Path) -> dict[str, Any]:
        try:
            with (path / "config.toml").open("rb") as file:
                sections = tomllib.load(file)
        except (OSError, ValueError):
            return {}
        return dict(flat_settings(masked_settings(sections)))

    configs = [read(path) for path in run_dirs]
    names = dict.fromkeys(name for config in configs for name in config)
    found = {name: [config.get(name) for config in configs] for name in sorted(names)}
    return {n: values for n, values in found.items() if any(v != values[0] for v in values)}


def is_run(path: Path) -> bool:
    return any((path / mark).is_file() for mark in MARKS)


def read_run(path: Path) -> Run:
    """The run in a directory. Raises OSError and DamagedFile if it cannot be read."""
    summary, file = read_summary(path), path / "summary.json"
    if summary is None and file.is_file():
        raise DamagedFile(f"{file} is no JSON object: remove it, and the events count")
    if summary is None:
        # Killed or still running: its events say what its summary would.
        run = Projection.read(path)
        # The controllers of a run that was started by hand stay after its end.
        state = run.status or ("running" if is_running(path) else "ended")
        reason, took_s = run.reason, run.took_s
        summary = summarise(run, status=state, reason=reason, wall_s=took_s)
    return Run(
        name=path.name,
        path=path,
        state=str(summary.get("status") or "ended"),
        reason=str(summary.get("reason") or ""),
        steps=steps if isinstance(steps := summary.get("steps"), int) else None,
        changed=_changed(path),
        **{
            name: float(value) if isinstance(value := summary.get(name), int | float) else None
            for name in NUMBERS
        },
    )


def _changed(path: Path) -> float:
    """Unix seconds of the newest file that marks a run; those that cannot be looked at are old."""
    times = [0.0]
    for mark in MARKS:
        with contextlib.suppress(OSError):
            times.append((path / mark).stat().st_mtime)
    return max(times)


def is_over(path: Path) -> bool:
    """Return True if the run has a summary, and none of its processes runs here."""
    return not is_running(path) and read_summary(path) is not None


def end_of(path: Path) -> str:
    """How the run ended, such as "finished after 3 steps" ("ended" if it was killed), and what is
    still done for it; empty if nothing tells of an end."""
    run = read_run(path)
    if run.state in ("running", "damaged") or (run.state == "ended" and not run.steps):
        return ""
    return f"{run.state} after {plural(run.steps or 0, 'step')}{still_done(path)}"


def still_done(path: Path) -> str:
    """Tells as a clause what its launcher still does for a run that has ended; empty: nothing."""
    if read_summary(path) is not None or not is_running(path):
        return ""
    return ", and its model is being exported and its journal verified (logs/export.log)"


def status_of_past(path: Path) -> admin_pb2.StatusReply:
    """The last state of a run that is over, without its processes, from its files."""
    from paceline.v1 import admin_pb2

    run, found = Projection.read(path), read_run(path)
    (last,) = run.newest_steps(1) or ({},)
    return admin_pb2.StatusReply(
        run_id=found.name,
        run_name=found.name,
        phase=found.state,
        reason=f"{found.reason}{still_done(path)}",
        step=run.step,
        total_steps=int(run.held_out.spec.get("steps") or run.step),
        version=int(last.get("version") or 0),
        checkpoint_step=run.checkpoints.saved[-1].step if run.checkpoints.saved else 0,
        metrics={n: v for n, v in last.items() if isinstance(v, int | float) and n not in HEAD},
        reward_trouble=run.held_out.trouble,
    )


def _places(directory: Path, depth: int) -> Iterator[Path]:
    if is_run(directory):
        yield directory
        return
    if depth == 0:
        return
    try:
        inner = sorted(p for p in directory.iterdir() if p.is_dir() and not p.is_symlink())
    except PermissionError:
        return
    for path in inner:
        yield from _places(path, depth - 1)


def is_running(path: Path) -> bool:
    """Return True if a process of this machine's fleet, or a controller beside it, is alive."""
    from paceline.observe.fleet_file import FleetRecord, ProcessId

    try:
        record = FleetRecord.read(path)
    except NotOurs:
        return False  # another user's run is looked at, and nothing is done to it
    if record is not None:
        return record.supervisor.alive() or bool(record.survivors())
    for file in (path / "controllers").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(file.read_text())
            if ProcessId(int(found["pid"]), float(found["started"])).alive():
                return True
    return False
