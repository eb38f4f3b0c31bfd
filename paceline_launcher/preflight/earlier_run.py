"""Check of the run that a directory holds already."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.changes import differences, problem_of_divisor
from paceline.config.load import ConfigError, load_config, run_digest
from paceline.config.schema import Config
from paceline.config.sections.training import LENGTHS
from paceline.errors import BadInput
from paceline.observe.json_lines import DamagedFile
from paceline.observe.projection import Projection
from paceline.observe.summary import can_extend, read_summary
from paceline_launcher.preflight.data import steps_of
from paceline_launcher.preflight.findings import Findings, Start, fail, ok, skip


def earlier_run(start: Start) -> Findings:
    if start.fresh or start.controllers:
        yield skip("--fresh removes it" if start.fresh else "the run is running")
        return
    config, run_dir = start.config, start.run_dir
    summary = read_summary(run_dir)
    continued = f"the one in {run_dir} is continued"
    # A Redis of the user's own knows a run by its name, wherever its directory is.
    elsewhere = "--run-dir DIR" if config.redis.url is None else "another run.name"
    if _extends(config, summary):
        continued = f"the one in {run_dir} is finished, and goes on to {steps_of(config)} steps"
    elif summary is not None and summary.get("status") == "finished":
        length = next(f"train.{n}" for n in LENGTHS if getattr(config.train, n) is not None)
        found = f"the run in {run_dir} is finished ({summary.get('steps')} steps)"
        remedy = (
            f"Give it more steps with a larger {length}, run it again with --fresh, or start "
            "another one "
            f"with {elsewhere}: with --from {run_dir} it begins with the weights of this one"
        )
        yield fail(found, remedy)
        return
    kept = run_dir / "config.toml"
    if not kept.is_file() or not (run_dir / "events.jsonl").is_file():
        yield ok(f"none in {run_dir}")
        return
    try:
        before = load_config(kept, stored=True)
    except ConfigError as error:
        yield fail(f"{kept} cannot be read: {error}", f"Start another run with {elsewhere}")
        return
    ours, theirs = run_digest(before)[1], run_digest(config)[1]
    if ours == theirs:
        found, why = f"the run in {run_dir} cannot be continued", problem_of_divisor(before, config)
        if not why:
            found, why = _fewer_steps(config, run_dir)
        yield fail(found, why) if why else ok(continued)
        return
    found = f"the run in {run_dir} has another config: {differences(ours, theirs)}"
    remedy = (
        f"Continue it with its own ({kept}), or start another one with {elsewhere}: with --from "
        f"{run_dir} it begins with the weights of this one"
    )
    yield fail(found, remedy)


def _fewer_steps(config: Config, run_dir: Path) -> tuple[str, str]:
    try:
        trained, steps = Projection.read(run_dir).history.step, steps_of(config)
    except (DamagedFile, BadInput):
        # Readers of the events say what is damaged, and the check of the data what is wrong.
        return "", ""
    if trained <= steps:
        return "", ""
    length = next(f"train.{n}" for n in LENGTHS if getattr(config.train, n) is not None)
    found = f"the run in {run_dir} has trained {trained} steps already, and {length} allows {steps}"
    return found, f"Raise {length}, so that the run has {trained} steps or more"


def _extends(config: Config, summary: Mapping[str, Any] | None) -> bool:
    try:
        return can_extend(summary, lambda: steps_of(config))
    except BadInput:
        return False  # the check of the data says what is wrong
