"""Runs in a directory tree and their results, from their files."""

import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config.changes import flat_settings
from paceline.masking import masked_settings
from paceline.observe.projection import Projection
from paceline.observe.run_files import DamagedFile
from paceline.observe.summary import read_summary, summarise
from paceline.process.files import NotOurs

DEPTH = 3
MARKS = ("summary.json", "events.jsonl", "config.toml")
"""A directory with one of these files is a run directory."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory. Rewards are means over steps, as in summary.json; None: unknown."""

    name: str
    path: Path
    state: str
    """running; finished, failed or interrupted; ended: not running and without a summary; damaged:
    its files cannot be read."""
    reason: str
    steps: int
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
    return sorted(map(_read_or_damaged, _places(directory, DEPTH)), key=lambda run: -run.changed)


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
    return any(_marks(path))


def _marks(path: Path) -> Iterator[Path]:
    return (file for mark in MARKS if (file := path / mark).is_file())


def read_run(path: Path) -> Run:
    """The run in a directory. Raises OSError and DamagedFile if it cannot be read."""
    summary = read_summary(path)
    if summary is None:
        # Killed or still running: its events say what its summary would.
        run = Projection.read(path)
        # The controllers of a run that was started by hand stay after its end.
        state = run.history.status or ("running" if is_running(path) else "ended")
        reason, took_s = run.history.reason, run.history.took_s
        summary = summarise(run, status=state, reason=reason, wall_s=took_s)
    return Run(
        name=path.name,
        path=path,
        state=str(summary.get("status") or "ended"),
        reason=str(summary.get("reason") or ""),
        steps=int(summary.get("steps") or 0),
        changed=max((m.stat().st_mtime for m in _marks(path)), default=0.0),
        **{name: _number(summary.get(name)) for name in NUMBERS},
    )


def _read_or_damaged(path: Path) -> Run:
    """A run that cannot be read must not hide the others."""
    try:
        return read_run(path)
    except (DamagedFile, OSError) as error:
        nothing = dict.fromkeys(NUMBERS)
        return Run(path.name, path, "damaged", str(error), steps=0, changed=0.0, **nothing)


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
    from paceline.observe.fleet_file import FleetRecord

    try:
        record = FleetRecord.read(path)
    except NotOurs:
        return False  # another user's run is looked at, and nothing is done to it
    if record is not None:
        return record.supervisor.alive() or bool(record.survivors())
    return any(_is_alive(file) for file in (path / "controllers").glob("*.json"))


def _is_alive(file: Path) -> bool:
    from paceline.observe.fleet_file import ProcessId

    try:
        found = json.loads(file.read_text())
        return ProcessId(int(found["pid"]), float(found["started"])).alive()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
