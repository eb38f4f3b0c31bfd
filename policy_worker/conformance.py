"""Check of one objective as a policy worker loads it, and of the properties that a fleet rests on.

    python -P -m policy_worker.conformance < {"config": ...}

Exit status 2, with one line on standard error, if it cannot be used: it cannot be loaded, or its
gradient depends on how a fleet splits a step. Each other property that a toy step does not have is
one line on standard output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from paceline.config.fields import RowForm
from paceline.config.load import ConfigError
from paceline.config.objectives import BUILT_IN
from paceline.config.schema import Config
from paceline.errors import one_line
from paceline.process.lifetime import leave_after
from paceline.user_code import asked
from policy_worker.objectives.load import ObjectiveError, load_objective
from policy_worker.toy_step import (
    GROUP_SIZE,
    TEACHER,
    ToyStep,
    random_group,
    random_groups,
)


def main() -> int:
    for line in doubts(Config.model_validate(asked()["config"])):
        print(line)
    return 0


def doubts(config: Config) -> list[str]:
    """Lists the properties that the objective lacks and a fleet does not rest on. Raises
    ObjectiveError if it cannot be used."""
    load_objective(config)
    name = f"train.algorithm = {config.train.algorithm}"
    try:
        found = conformance(config.train.algorithm, config.objective.options, _train(config))
    except ConfigError as error:
        return [f"{name}: its properties were not tried: {error}"]
    fails = {each: f"it fails at {each.name!r}: {each.problem}" for each in found if each.problem}
    if missing := [said for each, said in fails.items() if each.needed]:
        raise ObjectiveError(f"{name}: {'; '.join(missing)}")
    return [f"{name}: {said}" for said in fails.values()]


def _train(config: Config) -> dict[str, Any]:
    """The settings of [train] that a toy step may have: it has no scorer, and groups of its own."""
    given = config.train.model_dump(mode="json", exclude_defaults=True)
    for name in ("algorithm", "filter_uninformative"):
        given.pop(name, None)
    for name in ("reference", "reference_path"):
        given.get("loss", {}).pop(name, None)
    return given


CLOSE = 2e-4
"""Largest difference of two float32 gradients, relative to their largest element."""


@dataclass(frozen=True, slots=True)
class Property:
    name: str
    problem: str
    """Empty if it holds; else what differs, and what that usually means."""
    needed: bool
    """True if a fleet rests on it and it does not hold: a step after a death would be another."""


def conformance(
    algorithm: str,
    options: dict[str, Any],
    train: dict[str, Any],
    begins: Callable[[str], None] = lambda name: None,
) -> list[Property]:
    """Every property of an objective, held or not. ``train``: further settings of ``[train]``.
    ``begins`` is called with the name of each before it is tried, which may take seconds. Raises
    ObjectiveError if it cannot be loaded, and ConfigError on settings that do not fit."""
    config = toy_config(algorithm, options, train)
    load_objective(config)
    toy, found = ToyStep(config), []
    for name, (check, of_a_fleet) in _PROPERTIES.items():
        begins(name)
        try:
            problem = check(toy)
            found.append(Property(name, problem, bool(problem) and of_a_fleet))
        except (Exception, SystemExit, GeneratorExit) as error:  # a user's code may fail in any way
            found.append(Property(name, f"it raised {one_line(error)}", needed=False))
    return found


# ---- properties


def _replicas(toy: ToyStep) -> str:
    """Each replica adds its own groups."""
    alone = torch.stack([toy.gradient([group]) for group in toy.groups]).sum(0)
    why = "a group's summand depends on other groups: use the step's totals, not means of the batch"
    return _differ(toy, alone, why)


def _rounds(toy: ToyStep) -> str:
    """A survivor adds the groups of a replica that died later, in another order."""
    later = toy.gradient(toy.groups[3:], toy.groups[:1], toy.groups[1:3])
    return _differ(toy, later, "a summand depends on the order of groups, or loss() keeps a state")


def _rows(toy: ToyStep) -> str:
    """Rows of one sequence each, and all sequences in one row."""
    alone = toy.gradient(toy.groups, row_tokens=1)
    why = "loss() must be a sum over the tokens of its row, each times its weight, and no mean"
    return _differ(toy, alone, why)


def _sums(toy: ToyStep) -> str:
    """The sums that advance() gets are the same however a step is split."""
    _, whole = toy.gradient_and_sums(toy.groups)
    parts = [toy.gradient_and_sums([group], row_tokens=1)[1] for group in toy.groups]
    added = torch.stack(parts).sum(0)
    for name, one, other in zip(toy.objective.summed, whole.tolist(), added.tolist(), strict=True):
        if abs(one - other) > CLOSE * max(1.0, abs(one)):
            return (
                f"the sum {name} is {one:.6g} of all groups at once and {other:.6g} of one by one: "
                "sum over tokens"
            )
    return ""


def _repeatable(toy: ToyStep) -> str:
    """A replica that computes a step again must get the same bits."""
    same = torch.equal(toy.gradient(toy.groups), toy.gradient(toy.groups))
    why = "loss() or advantages() draws random numbers or keeps a state"
    return "" if same else f"the same step twice gives other gradients: {why}"


def _finite(toy: ToyStep) -> str:
    """Log-prob gaps of 60, rewards of 1e6, and a group whose rewards are equal."""
    generator = np.random.default_rng(8)
    extreme = random_groups(generator, gap=60.0, reward=1e6)
    if not torch.isfinite(toy.gradient(extreme, of=extreme)).all():
        what = "a log-prob gap of 60 or a reward of 1e6"
        return f"{what} gives a gradient that is not finite: clamp before exp"
    equal = random_groups(generator, reward=0.0)
    if not torch.isfinite(toy.gradient(equal, of=equal)).all():
        return "equal rewards give a gradient that is not finite: add an epsilon to divisors"
    return ""


def _masked(toy: ToyStep) -> str:
    """Tokens of environments and tokens that are too old train nothing."""
    old = [random_group(np.random.default_rng(9), "old", versions=[0])]
    if toy.gradient(old).abs().max() > 0:
        remedy = "multiply by the token's weight, which is 0 there"
        return f"tokens that are not trained have a gradient: {remedy}"
    return ""


_PROPERTIES: dict[str, tuple[Callable[[ToyStep], str], bool]] = {
    "groups may be split over replicas": (_replicas, True),
    "groups may be added in rounds": (_rounds, True),
    "sequences may be packed into rows": (_rows, True),
    "sums of a step add up": (_sums, True),
    "a step can be computed again": (_repeatable, True),
    "gradients are finite": (_finite, False),
    "masked tokens train nothing": (_masked, False),
}
"""The check of each property, and whether a fleet rests on it."""


def _differ(toy: ToyStep, other: Tensor, why: str) -> str:
    """Compares ``other`` with the gradient of all groups at once."""
    one = toy.gradient(toy.groups)
    largest = float(one.abs().max())
    difference = float((one - other).abs().max())
    if difference <= CLOSE * max(largest, 1e-6):
        return ""
    return f"gradients differ by {difference:.2g}, of {largest:.2g} at most: {why}"


_FIELDS = {
    RowForm.CHAT: {"messages_field": "messages"},
    RowForm.PAIR: {"chosen_field": "chosen", "rejected_field": "rejected"},
}


def toy_config(algorithm: str, options: dict[str, Any], train: dict[str, Any]) -> Config:
    """The config of a toy step. Raises ConfigError on settings that do not fit."""
    # Groups of the toy have several completions, also for an objective of recorded data.
    entry = BUILT_IN.get(algorithm)
    recorded = entry is not None and not entry.samples
    sections = {
        "model": {"path": "toy", "device": "cpu"},
        "data": {"path": "toy", **(_FIELDS[entry.forms[0]] if entry and recorded else {})},
        "train": {**train, "algorithm": algorithm},
        "objective": options,
        "rollout": {
            **({"source": "recorded"} if recorded else {"group_size": GROUP_SIZE}),
            "max_tokens": 16,
        },
        "scorers": {TEACHER: {"kind": "logprobs", "path": "toy"}},
    }
    try:
        return Config.model_validate(sections)
    except ValidationError as error:
        found = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError("\n".join(found)) from None


if __name__ == "__main__":
    leave_after(main, "check")
