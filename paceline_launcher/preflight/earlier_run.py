"""The run that a directory holds already, and settings that contradict each other."""

import contextlib
from pathlib import Path
from typing import Any

from paceline.config.changes import differences, problem_of_divisor
from paceline.config.load import ConfigError, changeable, changed_config, load_config, run_digest
from paceline.config.objectives import ignored
from paceline.config.schema import Config
from paceline.config.sections.training import LENGTHS
from paceline.errors import BadInput, plural
from paceline.observe.projection import Projection
from paceline.observe.run_files import DamagedFile, read_lines
from paceline.observe.runs import can_extend, read_summary
from paceline.observe.vocabulary import EventType
from paceline_launcher.preflight.data import steps_of
from paceline_launcher.preflight.findings import Findings, Start, fail, ok, skip, warn


def earlier_run(start: Start) -> Findings:
    if start.fresh:
        yield skip("--fresh removes it")
        return
    run_dir = start.run_dir
    config, stays = in_force(start.config, run_dir)
    summary = read_summary(run_dir)
    # A Redis of the user's own knows a run by its name, wherever its directory is.
    elsewhere = "--run-dir DIR" if config.redis.url is None else "another run.name"
    another = f"start another one with {elsewhere}: with --from {run_dir} it begins with the "
    another += "weights of this one"
    length = next(f"train.{n}" for n in LENGTHS if getattr(config.train, n) is not None)
    trained, steps, extended = 0, 0, False
    # Readers of the events say what is damaged, and the check of the data what is wrong.
    with contextlib.suppress(BadInput):
        run = Projection.read(run_dir)
        extended = can_extend(run, lambda: steps_of(config))
        trained, steps = run.step, steps_of(config)
    if summary is not None and summary.get("status") == "finished" and not extended:
        found = (
            f"the run in {run_dir} is finished ({plural(int(summary.get('steps') or 0), 'step')})"
        )
        remedy = f"Give it more steps with a larger {length}, run it again with --fresh, or"
        yield fail(found, f"{remedy} {another}")
        return
    kept = run_dir / "config.toml"
    if not kept.is_file() or not (run_dir / "events.jsonl").is_file():
        yield ok(f"none in {run_dir}")
        return
    try:
        before, _ = in_force(load_config(kept), run_dir)
    except ConfigError as error:
        yield fail(str(error), f"Start another run with {elsewhere}")
        return
    ours, theirs = run_digest(before)[1], run_digest(config)[1]
    if ours != theirs:
        found = f"the run in {run_dir} has another config: {differences(ours, theirs)}"
        yield fail(found, f"Continue it with its own ({kept}), or {another}")
        return
    if why := problem_of_divisor(before, config):
        yield fail(f"the run in {run_dir} cannot be continued", why)
        return
    if trained > steps:
        found = (
            f"the run in {run_dir} has trained {trained} steps already, and {length} allows {steps}"
        )
        yield fail(found, f"Raise {length}, so that the run has {trained} steps or more")
    elif extended:
        yield ok(f"the one in {run_dir} is finished, and goes on to {steps} steps")
    else:
        yield ok(f"the one in {run_dir} is continued")
    for name, value in stays.items():
        found = f"{name} stays {value}, as it was set while the run ran"
        yield warn(found, "Edit it in the file to change it, or use paceline set")


def in_force(config: Config, run_dir: Path) -> tuple[Config, dict[str, Any]]:
    """``config`` as the next leader of the run in ``run_dir`` will have it, and what was set while
    the run ran: it stays unless the file's value was edited since."""
    from controller.ledger.state.settings import Settings

    known, file = Settings(), changeable(config)
    try:
        for line in read_lines(run_dir / "events.jsonl"):
            if line.get("type") == EventType.RUN_STARTED:
                known.values = dict(line.get("settings") or {})
                known.configured = dict(known.values)
            elif line.get("type") == EventType.SETTINGS_CHANGED:
                known.values |= {name: new for name, (_, new) in line["changes"].items()}
                known.configured |= line["configured"]
    except (DamagedFile, OSError, KeyError, TypeError, ValueError):
        return config, {}  # readers of the events say what is damaged
    edited = known.edited(file) if known.configured else file
    stays = {
        name: value
        for name, value in known.values.items()
        if name not in edited and file.get(name, value) != value
    }
    return changed_config(config, stays), stays


def config_warnings(config: Config) -> Findings:
    rollout, train = config.rollout, config.train
    cut = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0}
    filters = [f"rollout.{n} = {getattr(rollout, n):g}" for n, applies in cut.items() if applies]
    names = ("mask_ratio_sequence", "mask_ratio_token")
    masks = [f"train.loss.{name}" for name in names if getattr(train.loss, name) is not None]
    if unread := [f"train.loss.{name}" for name in ignored(train)]:
        yield warn(
            f"{', '.join(unread)}: no effect with train.algorithm = {train.algorithm}, whose loss "
            "has no such term",
            "Remove them",
        )
    if not (filters and masks):
        yield ok("none contradicts another")
        return
    # A kept token has at least its whole-distribution probability once the rest is cut away.
    yield warn(
        f"{' and '.join(filters)} with {' and '.join(masks)}: the sampler truncates the "
        "distribution and the trainer's log-probs are of the whole one. The ratios that are masked "
        "by then lie below 1 even if nothing is stale",
        "Sample with top_p = 1 and top_k = 0, or remove the masks",
    )
