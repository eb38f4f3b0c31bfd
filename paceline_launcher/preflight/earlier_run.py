"""The run that a directory holds already: whether it goes on, and with which settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.changes import differences, problem_of_divisor
from paceline.config.load import (
    ConfigError,
    changeable,
    changed_config,
    load_config,
    run_digest,
)
from paceline.config.schema import Config
from paceline.config.sections.training import LENGTHS
from paceline.errors import BadInput
from paceline.observe.json_lines import DamagedFile, read_lines
from paceline.observe.projection import Projection
from paceline.observe.summary import can_extend, read_summary
from paceline.observe.vocabulary import EventType
from paceline_launcher.preflight.data import steps_of
from paceline_launcher.preflight.findings import Findings, Start, fail, ok, skip


def earlier_run(start: Start) -> Findings:
    if start.fresh or start.controllers:
        yield skip("--fresh removes it" if start.fresh else "the run is running")
        return
    run_dir, summary = start.run_dir, read_summary(start.run_dir)
    config, _ = in_force(start.config, run_dir)
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
        before, _ = in_force(load_config(kept, stored=True), run_dir)
    except ConfigError as error:
        yield fail(f"{kept} cannot be read: {error}", f"Start another run with {elsewhere}")
        return
    ours, theirs = run_digest(before)[1], run_digest(config)[1]
    if ours == theirs:
        found, why = f"the run in {run_dir} cannot be continued", problem_of_divisor(before, config)
        if not why:
            found, why = _fewer_steps(config, run_dir)
        stays = "; ".join((continued, *set_meanwhile(start.config, run_dir)))
        yield fail(found, why) if why else ok(stays)
        return
    found = f"the run in {run_dir} has another config: {differences(ours, theirs)}"
    remedy = (
        f"Continue it with its own ({kept}), or start another one with {elsewhere}: with --from "
        f"{run_dir} it begins with the weights of this one"
    )
    yield fail(found, remedy)


def in_force(config: Config, run_dir: Path) -> tuple[Config, Mapping[str, Any]]:
    """``config`` with what was set while the run in ``run_dir`` ran, as its next leader will have
    it: a setting that was edited in the file since then is the file's. And these settings."""
    from controller.ledger.state.settings import Settings

    known = Settings()
    try:
        for line in read_lines(run_dir / "events.jsonl"):
            if line.get("type") == EventType.RUN_STARTED:
                known.values = dict(line.get("settings") or {})
                known.configured = dict(known.values)
            elif line.get("type") == EventType.SETTINGS_CHANGED:
                known.values |= {name: new for name, (_, new) in line["changes"].items()}
                known.configured |= line["configured"]
    except (DamagedFile, OSError):
        return config, {}  # readers of the events say what is damaged
    file = changeable(config)
    edited = known.edited(file) if known.configured else file
    stays = {
        name: value
        for name, value in known.values.items()
        if name not in edited and file.get(name, value) != value
    }
    return changed_config(config, stays), stays


def set_meanwhile(config: Config, run_dir: Path) -> list[str]:
    """A line for each setting that differs from the file, because it was set while the run ran."""
    file, (_, stays) = changeable(config), in_force(config, run_dir)
    return [
        f"{name} = {value}, as it was set while the run ran (the file has {file[name]})"
        for name, value in stays.items()
        if value is not None
    ]


def steps_to_extend_to(config: Config, run_dir: Path) -> int:
    """Steps of a finished run that is given more of them; 0 for any other."""
    now, _ = in_force(config, run_dir)
    return steps_of(now) if _extends(now, read_summary(run_dir)) else 0


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
