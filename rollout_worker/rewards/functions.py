"""Reward functions by their names in the config. Imports no torch: scoring processes use it."""

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from paceline.config.sections.scorers import named_scorer
from paceline.config.sections.training import BUILT_IN_REWARDS
from paceline.errors import BadInput
from paceline.process.user_code import NotFound, find
from rollout_worker.rewards import builtin

_FORMAT = "format:"


class RewardError(BadInput):
    """A reward function cannot be used."""


@dataclass(frozen=True, slots=True)
class Reward:
    """One function of the weighted sum. ``component``: the name of its value in reports."""

    component: str
    weight: float
    call: Callable[..., Any]
    accepts: frozenset[str] | None  # Keyword arguments to pass; None: all
    batch: bool  # Takes ``completions`` of a whole group and returns a value for each
    waits: bool  # A coroutine function

    def select(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self.accepts is None:
            return dict(arguments)
        return {name: value for name, value in arguments.items() if name in self.accepts}


def weights_of(functions: Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    """Weight of each function; 1 for functions of a plain list. Raises RewardError if there is no
    function, or one is named twice."""
    if isinstance(functions, Mapping):
        weights = {name: float(weight) for name, weight in functions.items()}
    else:
        weights = dict.fromkeys(functions, 1.0)
        if len(weights) != len(functions):
            raise RewardError("reward.functions: a function is named twice")
    if not weights:
        raise RewardError("reward.functions: name at least one, for example exact_match")
    return weights


def load(functions: Sequence[str] | Mapping[str, float]) -> list[Reward]:
    """Imports every function; scorers are none. Raises RewardError with the function's name."""
    rewards: list[Reward] = []
    for name, weight in weights_of(functions).items():
        if named_scorer(name) is not None:
            continue
        call = _find(name)
        taken = {reward.component for reward in rewards}
        component = base = _component(name)
        for number in range(2, len(taken) + 3):
            if component not in taken:
                break
            component = f"{base[:60]}-{number}"
        rewards.append(_describe(name, component, weight, call))
    return rewards


def _find(name: str) -> Callable[..., Any]:
    if name in BUILT_IN_REWARDS:
        return cast(Callable[..., Any], getattr(builtin, BUILT_IN_REWARDS[name]))
    if name.startswith(_FORMAT):
        try:
            return builtin.format_reward(name.removeprefix(_FORMAT))
        except re.error as error:
            raise RewardError(f"reward {name!r}: not a regular expression: {error}") from None
    if ":" not in name:
        close = difflib.get_close_matches(name, BUILT_IN_REWARDS, 1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise RewardError(
            f"{name} is not a reward: {meant}Name one that is built in "
            f"({', '.join(BUILT_IN_REWARDS)}, format:REGEX), or a function of your own as "
            "package.module:function"
        )
    try:
        return cast(Callable[..., Any], find(name))
    except NotFound as error:
        raise RewardError(f"reward {name!r}: {error}") from error


def _component(name: str) -> str:
    if name.startswith(_FORMAT):
        return "format"
    return re.sub(r"[^A-Za-z0-9_.:/-]", "_", name)[-64:]


def _describe(name: str, component: str, weight: float, call: Callable[..., Any]) -> Reward:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        raise RewardError(f"reward {name!r}: its parameters cannot be read") from None
    names = frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise RewardError(f"reward {name!r}: parameters must be usable by name")
    batch = "completions" in names
    if not batch and "completion" not in names and not open_ended:
        raise RewardError(
            f"reward {name!r}: it takes neither 'completion' nor 'completions' "
            f"(see docs/rewards.md for the parameters it may take)"
        )
    waits = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004
    )
    return Reward(component, weight, call, None if open_ended else names, batch, waits)
