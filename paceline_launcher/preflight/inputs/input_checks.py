"""Checks of what a run reads: model, data and reward functions."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config.built_in_rewards import BUILT_IN_REWARDS
from paceline.config.run_length import length_in_words
from paceline.config.schema import Config
from paceline.config.sections.scorers import named_scorer
from paceline.errors import BadInput
from paceline_launcher.preflight.check import CORRECT, LENGTH, Check, fail, ok
from paceline_launcher.preflight.inputs.data import check_data
from paceline_launcher.preflight.inputs.first_row import first_row
from paceline_launcher.preflight.inputs.import_check import import_check
from paceline_launcher.preflight.inputs.models import model_problems
from paceline_launcher.preflight.inputs.objective import objective_checks


def inputs(config: Config) -> Iterator[Check]:
    data = check_data(config)
    named = [*model_problems(config, data.first_row), *data.problems]
    problems = [
        *(_bad(found, remedy) for found, remedy in named),
        *_rewards(config),
        *_engine(config),
    ]
    problems += [*objective_checks(config), *_judges(config)]
    if not named:
        problems += first_row(config, data.first_row)
    length, wrong = _length(config, data.rows)
    problems += wrong
    yield from length
    yield from problems
    if not any(check.state == "fail" for check in problems):
        yield ok("inputs", "model, data and rewards are there")


def _length(config: Config, rows: int) -> tuple[list[Check], list[Check]]:
    """The length of the run if its rows could be read, and what is wrong with it."""
    try:
        return [ok(LENGTH, length_in_words(config, rows))] if rows else [], []
    except BadInput as error:
        return [], [_bad(str(error))]


def _bad(found: str, remedy: str = CORRECT) -> Check:
    return fail("inputs", found, remedy)


def _rewards(config: Config) -> Iterator[Check]:
    if not config.reward.functions:
        found = "reward.functions is empty"
        yield _bad(found, 'Name at least one function, for example ["exact_match"]')
    named = dict.fromkeys(config.reward.functions, "reward.functions")
    for each, of in config.evaluation.sets.items():
        for name in of.reward or ():
            named.setdefault(name, f"evaluation.sets.{each}.reward")
    for name, setting in named.items():
        if name not in BUILT_IN_REWARDS and named_scorer(name) is None:
            problem = import_check("rollout_worker.rewards.check", name).problem
            if problem:
                yield _bad(f"{setting}: {problem}")


def _engine(config: Config) -> Iterator[Check]:
    if ":" in config.rollout.engine and not config.recorded:
        problem = import_check("rollout_worker.engine.check", config.rollout.engine).problem
        if problem:
            yield _bad(problem)


def _judges(config: Config) -> Iterator[Check]:
    """One call to each judge behind a URL; a model of the run's own is loaded where its scorer
    starts."""
    for name, scorer in config.scorers.by_name.items():
        if scorer.url is not None:
            settings = scorer.model_dump_json(exclude_none=True)
            if problem := import_check("scorer_worker.check", name, settings).problem:
                yield _bad(problem, "Start the server, or correct the section of the scorer")
