"""Checks of imports that a run names, each in a process of its own: what a user's module loads, or
torch, must not stay in the launcher."""

import json
import subprocess
from dataclasses import dataclass

from paceline.config.objectives import BUILT_IN
from paceline.config.schema import Config
from paceline.config.sections.scorers import named_scorer
from paceline.config.sections.training import BUILT_IN_REWARDS
from paceline.process.user_code import python_module
from paceline_launcher.preflight.findings import Findings, Start, fail, ok, warn

LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Tried:
    problem: str
    """The reason why it cannot be used, or empty."""
    lines: tuple[str, ...] = ()
    """Lines of its standard output."""


def try_import(check: str, name: str, *more: str, given: str = "") -> Tried:
    """Runs ``check``, a module of ours that imports ``name``, with ``given`` on standard input."""
    try:
        done = subprocess.run(
            [*python_module(check), name, *more],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=LIMIT_S,
            input=given,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Tried(f"{name}: the import takes longer than {LIMIT_S:.0f} s")
    if done.returncode == 0:
        return Tried("", tuple(line for line in done.stdout.splitlines() if line.strip()))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if not lines:
        return Tried(f"{name}: its import ended the process with exit status {done.returncode}")
    return Tried(lines[-1].removeprefix("check: "))


def rewards(config: Config) -> Findings:
    if not config.reward.functions:
        remedy = 'Name at least one function, for example ["exact_match"]'
        yield fail("reward.functions is empty", remedy)
    settings = dict.fromkeys(config.reward.functions, "reward.functions")
    for set_name, eval_set in config.evaluation.sets.items():
        for name in eval_set.reward or ():
            settings.setdefault(name, f"evaluation.sets.{set_name}.reward")
    for name, setting in settings.items():
        if name in BUILT_IN_REWARDS or named_scorer(name) is not None:
            continue
        if problem := try_import("rollout_worker.rewards.functions", name).problem:
            yield fail(f"{setting}: {problem}")


def engine(config: Config) -> Findings:
    name = config.rollout.engine
    if ":" not in name or config.recorded:
        return
    if problem := try_import("rollout_worker.engine.own_engine", name).problem:
        yield fail(problem)


def objective(config: Config) -> Findings:
    """Tries an objective of a user: a worker can load it, and a step may be split in any way."""
    name = config.train.algorithm
    if name in BUILT_IN:
        return
    tried = try_import("policy_worker.conformance", name, config.model_dump_json())
    if tried.problem:
        yield fail(tried.problem)
        return
    for line in tried.lines:
        yield warn(line, f"paceline check-objective {name} tries it alone")


def judges(config: Config) -> Findings:
    for name, scorer in config.scorers.by_name.items():
        if scorer.url is not None:
            settings = scorer.model_dump_json(exclude_none=True)
            if problem := try_import("scorer_worker.url_judge", name, settings).problem:
                yield fail(problem, "Start the server, or correct the section of the scorer")


def first_row(start: Start) -> Findings:
    config, row = start.config, start.data.first_row
    if row is None or not config.recorded:
        return
    text = json.dumps(row, default=str)
    tried = try_import("paceline.dataset.recorded_preview", config.model_dump_json(), given=text)
    if tried.problem:
        remedy = "Correct the row or the fields of [data] (docs/recorded-data.md)"
        source = "path" if config.data.path is not None else f"sources.{min(config.data.sources)}"
        yield fail(f"data.{source}: {tried.problem}", remedy)
        return
    yield ok("\n    ".join(tried.lines))
