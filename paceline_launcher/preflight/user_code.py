"""Checks of imports that a run names, each in a process of its own: what a user's module loads, or
torch, must not stay in the launcher."""

import json
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.config.objectives import BUILT_IN
from paceline.config.schema import Config
from paceline.config.sections.scorers import named_scorer
from paceline.user_code import python_module
from paceline_launcher.preflight.findings import (
    CORRECT,
    Findings,
    Start,
    fail,
    ok,
    warn,
)


class Tried(NamedTuple):
    problem: str  # the reason why it cannot be used, or empty
    lines: Sequence[str] = ()  # of its standard output

    def findings(self, setting: str, remedy: str = CORRECT) -> Findings:
        if self.problem:
            yield fail(f"{setting}{self.problem}", remedy)


def try_import(check: str, name: str, **given: Any) -> Tried:
    """Runs ``check``, a module of ours that imports ``name``. ``given``, JSON, goes to its standard
    input: a command line is for every user of the machine to read."""
    done = subprocess.run(
        python_module(check),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        input=json.dumps({"name": name, **given}, default=str),
        check=False,
    )
    if done.returncode == 0:
        return Tried("", [line for line in done.stdout.splitlines() if line.strip()])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if not lines:
        return Tried(f"{name}: its import ended the process with exit status {done.returncode}")
    return Tried(lines[-1].removeprefix("check: "))


REWARD = "Name a reward that is built in, or package.module:function (docs/rewards.md)"
TRY = "Mend the function: paceline check-reward CONFIG calls it on any row and completion"


def rewards(start: Start) -> Findings:
    config = start.config
    settings = dict.fromkeys(config.reward.functions, "reward.functions")
    for set_name, eval_set in config.evaluation.sets.items():
        for name in eval_set.reward or ():
            settings.setdefault(name, f"evaluation.sets.{set_name}.reward")
    plain = ("exact_match", *(name for name in settings if named_scorer(name) is not None))
    if config.recorded or (not config.rollout.environment and settings.keys() <= set(plain)):
        return  # there is nothing to import or to try
    tried = try_import(
        "rollout_worker.check_rewards",
        "reward",
        config=config.model_dump(mode="json"),
        row=start.data.first_row,
    )
    if tried.problem:
        named = [f"{setting}: " for name, setting in settings.items() if name in tried.problem]
        yield from tried.findings(named[0] if named else "rewards: ", REWARD)
        return
    trial = json.loads(tried.lines[-1])
    if trial["problem"]:
        where = "rollout.environment" if config.rollout.environment else "reward.functions"
        found = f"{where}: tried on the first row with a made-up completion: {trial['problem']}"
        if trial["trace"]:
            found += "\n    " + trial["trace"].rstrip().replace("\n", "\n    ") + "\n"
        yield fail(found, TRY) if trial["wrong"] else warn(found, TRY)


def engine(config: Config) -> Findings:
    name = config.rollout.engine
    if ":" not in name or config.recorded:
        return
    turns = config.takes_turns
    yield from try_import("rollout_worker.engine.choice", name, turns=turns).findings("")


def objective(config: Config) -> Findings:
    """Tries an objective of a user: a worker can load it, and a step may be split in any way."""
    name = config.train.algorithm
    if name in BUILT_IN:
        return
    tried = try_import("policy_worker.conformance", name, config=config.model_dump(mode="json"))
    yield from tried.findings("")
    for line in tried.lines:
        yield warn(line, f"paceline check-objective {name} tries it alone")


def judges(config: Config) -> Findings:
    for name, scorer in config.scorers.by_name.items():
        if scorer.url is not None:
            settings = scorer.model_dump(mode="json", exclude_none=True)
            tried = try_import("scorer_worker.url_judge", name, settings=settings)
            yield from tried.findings("", "Start the server, or correct the section of the scorer")


def first_row(start: Start) -> Findings:
    config, row = start.config, start.data.first_row
    if row is None or not config.recorded:
        return
    settings = config.model_dump(mode="json")
    tried = try_import("paceline.dataset.recorded_preview", "row", config=settings, row=row)
    source = "path" if config.data.path is not None else f"sources.{min(config.data.sources)}"
    remedy = "Correct the row or the fields of [data] (docs/recorded-data.md)"
    yield from tried.findings(f"data.{source}: ", remedy)
    if tried.lines:
        yield ok("\n    ".join(tried.lines))
