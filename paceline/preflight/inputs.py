"""Checks of what a run reads: model, data and reward functions."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from paceline.config.schema import Config
from paceline.preflight.check import CORRECT, Check, fail, ok
from paceline.preflight.data import data_problems
from paceline.preflight.models import model_problems
from paceline.process.user_code import python_module

BUILT_IN_REWARDS = ("exact_match", "math_verify")
IMPORT_LIMIT_S = 120.0


def inputs(config: Config) -> Iterator[Check]:
    first_row, data = data_problems(config)
    named = [*model_problems(config, first_row), *data]
    problems = [*(_bad(found, remedy) for found, remedy in named), *_rewards(config)]
    yield from problems or [ok("inputs", "model, data and rewards are there")]


def _bad(found: str, remedy: str = CORRECT) -> Check:
    return fail("inputs", found, remedy)


def _rewards(config: Config) -> Iterator[Check]:
    if not config.reward.functions:
        found = "reward.functions is empty"
        yield _bad(found, 'Name at least one function, for example ["exact_match"]')
    for name in config.reward.functions:
        if name not in BUILT_IN_REWARDS and (problem := _reward_problem(name)):
            yield _bad(f"reward.functions: {problem}")


def _reward_problem(name: str) -> str:
    """Imports the function in a process of its own: what a user's module loads must not stay here."""
    try:
        done = subprocess.run(
            [*python_module("rollout_worker.rewards.check"), name],
            capture_output=True,
            text=True,
            timeout=IMPORT_LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{name}: the import takes longer than {IMPORT_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if not lines:
        return f"{name}: its import ended the process with exit status {done.returncode}"
    return lines[-1].removeprefix("check: ")
