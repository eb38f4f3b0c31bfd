"""Checks of what a run reads: model, data and reward functions."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from paceline.config.schema import Config
from paceline.dataset.rows import DataError, check_rows, load_rows
from paceline.preflight.check import Check, fail, ok
from paceline.process.user_code import python_module

BUILT_IN_REWARDS = ("exact_match", "math_verify")
IMPORT_LIMIT_S = 120.0
GIVE_MODEL = "Give a model directory or a hub name"
WEIGHTS = (".safetensors", ".bin")


def inputs(config: Config) -> Iterator[Check]:
    problems = [*_models(config), *_data(config), *_rewards(config)]
    yield from problems or [ok("inputs", "model, data and rewards are there")]


def _bad(found: str, remedy: str = "Correct the setting that this line begins with") -> Check:
    return fail("inputs", found, remedy)


def _models(config: Config) -> Iterator[Check]:
    model, train = config.model, config.train
    used = [("model.path", model.path, True)]
    if model.tokenizer is not None:
        used.append(("model.tokenizer", model.tokenizer, False))
    if train.kl_coef > 0 and train.reference_path is not None:
        used.append(("train.reference_path", train.reference_path, True))
    for setting, path, whole in used:
        if problem := _model_problem(path, whole):
            found, remedy = problem
            yield _bad(f"{setting}: {path}{found}", remedy)


def _model_problem(path: str, whole: bool) -> tuple[str, str] | None:
    """What is wrong with the directory, and the remedy. ``whole``: it needs a model's weights too."""
    local = Path(path).expanduser()
    if not local.exists():
        looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
        if looks_local or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
            return ": no such directory", GIVE_MODEL
        if local.parent.is_dir() and "/" in path:
            return f": no such directory, though {local.parent} is one", GIVE_MODEL
        return None
    if not local.is_dir():
        return " is not a directory", "Give the directory of a model"
    try:
        names = {entry.name for entry in local.iterdir()}
        if whole:
            json.loads((local / "config.json").read_text())
    except FileNotFoundError as error:
        return f" has no {Path(error.filename).name}: not a model directory", GIVE_MODEL
    except (OSError, ValueError) as error:
        return f" cannot be read: {error}", GIVE_MODEL
    if whole and not any(name.endswith(WEIGHTS) for name in names):
        return " has no weights (*.safetensors)", "Save the model there first"
    return None


def _data(config: Config) -> Iterator[Check]:
    data = config.data
    sources = [("data.path", data.path, data.split)]
    if data.eval_path is not None:
        sources.append(("data.eval_path", data.eval_path, data.eval_split))
    for setting, path, split in sources:
        try:
            check_rows(load_rows(path, name=data.name, split=split), data)
        except DataError as error:
            yield _bad(f"{setting}: {error}")


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
