"""The run that a directory holds already, and settings that contradict each other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.changes import differences, problem_of_divisor
from paceline.config.load import ConfigError, load_config, run_digest
from paceline.config.objectives import ignored
from paceline.config.schema import Config
from paceline.config.sections.objective_options import DistillOptions
from paceline.config.sections.scorers import named_scorer
from paceline.config.sections.training import LENGTHS
from paceline.errors import BadInput
from paceline.observe.json_lines import DamagedFile
from paceline.observe.projection import Projection
from paceline.observe.summary import can_extend, read_summary
from paceline_launcher.preflight.data import steps_of
from paceline_launcher.preflight.findings import Findings, Start, fail, ok, skip, warn


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
        before = load_config(kept)
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


def config_warnings(config: Config) -> Findings:
    rollout, train = config.rollout, config.train
    limits = {
        "top_p": (rollout.top_p, rollout.top_p < 1),
        "top_k": (rollout.top_k, rollout.top_k > 0),
    }
    filters = [f"rollout.{n} = {value:g}" for n, (value, applies) in limits.items() if applies]
    names = ("mask_ratio_sequence", "mask_ratio_token")
    masks = [f"train.loss.{name}" for name in names if getattr(train.loss, name) is not None]
    yield from _without_effect(config)
    yield from _scorers(config)
    unsaved = config.data.eval_path is not None and train.eval_every % train.checkpoint_every
    if unsaved:
        yield warn(
            f"train.eval_every = {train.eval_every} is no multiple of train.checkpoint_every = "
            f"{train.checkpoint_every}: most evaluations are of no checkpoint, and the best one of "
            "the run may not be kept",
            "Set train.eval_every to a multiple of train.checkpoint_every",
        )
    if not (filters and masks):
        if not unsaved:
            yield ok("none contradicts another")
        return
    # A kept token has at least its whole-distribution probability once the rest is cut away.
    yield warn(
        f"{' and '.join(filters)} with {' and '.join(masks)}: the sampler truncates the "
        "distribution and the trainer's log-probs are of the whole one. The ratios that are masked "
        "by then lie below 1 even if nothing is stale",
        "Sample with top_p = 1 and top_k = 0, or remove the masks",
    )


_ENGINE = (
    *("engine", "top_p", "top_k", "stop", "max_sequences", "dtype", "on_update"),
    *("tensor_parallel", "verify", "verify_every", "relay_fanout", "partial_every_tokens"),
    *("max_turns", "vllm", "engine_options"),
)
"""Settings of ``[rollout]`` that only an engine reads."""


def _without_effect(config: Config) -> Findings:
    """Settings that the objective does not read, or that need an engine which the run has not."""
    train = config.train
    if unread := [f"train.loss.{name}" for name in ignored(train)]:
        yield warn(
            f"{', '.join(unread)}: no effect with train.algorithm = {train.algorithm}, whose loss "
            "has no such term",
            "Remove them",
        )
    if not config.recorded:
        return
    fields = type(config.rollout).model_fields
    changed = [
        f"rollout.{name}"
        for name in _ENGINE
        if getattr(config.rollout, name) != fields[name].get_default(call_default_factory=True)
    ]
    if changed:
        yield warn(
            f'{", ".join(changed)}: no effect with rollout.source = "recorded", which has no '
            "engine",
            "Remove them",
        )


def _scorers(config: Config) -> Findings:
    """Scorers whose answers nothing reads, but a user's objective may."""
    named = {*config.reward.functions, config.train.loss.reference}
    for of in config.evaluation.sets.values():
        named |= set(of.reward or ())
    used = {name for one in named if (name := named_scorer(one)) is not None}
    own_objective = ":" in config.train.algorithm
    if config.train.algorithm == "distill":
        used.add(str(config.objective.options.get("teacher", DistillOptions().teacher)))
    for name, scorer in config.scorers.by_name.items():
        if name in used or (scorer.kind == "logprobs" and own_objective):
            continue
        if scorer.kind == "logprobs":
            yield warn(
                f"scorers.{name}: it computes the log-probs of every group and nothing reads them",
                f'Set train.loss.reference = "scorer:{name}" or train.algorithm = "distill", or '
                "remove the section",
            )
        else:
            yield warn(
                f"scorers.{name}: no reward names it, so its workers are never asked",
                f'Add "scorer:{name}" to reward.functions or to the reward of an evaluation set, '
                "or remove the section",
            )
