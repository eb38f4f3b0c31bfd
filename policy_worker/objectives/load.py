"""Objectives by the name that ``train.algorithm`` gives them."""

import inspect
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

from pydantic import ValidationError

from paceline.config.objectives import BUILT_IN, problem_of
from paceline.config.schema import Config
from paceline.errors import BadInput, one_line
from paceline.user_code import NotFound, find
from policy_worker.objectives.objective import POLICY, REFERENCE, Objective, Part

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class ObjectiveError(BadInput):
    """An objective cannot be used. The message names the setting and the remedy."""


def load_objective(config: Config) -> Objective:
    """The objective of a run. Raises ObjectiveError."""
    name = config.train.algorithm
    kind = objective_class(name)
    check_options(kind, name, config.objective.options)
    try:
        objective = kind(config)
        problem = _problem_of_parts(objective.trains, objective.frozen)
    except BaseException as error:  # a user's constructor may fail in any way, sys.exit() included
        raise ObjectiveError(f"train.algorithm = {name}: {one_line(error)}") from error
    if problem:
        raise ObjectiveError(f"train.algorithm = {name}: {problem}")
    return objective


def _problem_of_parts(trains: Sequence[Part], frozen: Sequence[Part]) -> str:
    if not trains:
        return "trains names no part: name at least one"
    parts = [*trains, *frozen]
    if strange := [p for p in parts if not (isinstance(p, Part) and _NAME.fullmatch(p.name))]:
        return f"{strange[0]!r} is not a Part with a name of small letters, digits and _"
    names = [part.name for part in parts]
    if twice := [name for name in names if names.count(name) > 1]:
        return f"two parts are named {twice[0]}: give each a name of its own"
    for part, only in [*((p, POLICY) for p in trains), *((p, REFERENCE) for p in frozen)]:
        if (part.head == "lm") != (part.name == only):
            kind = "trained" if only == POLICY else "frozen"
            return (
                f"the part {part.name} has the head {part.head}: a {kind} language model is named "
                f"{only}, and no other part is"
            )
    return ""


def objective_class(name: str) -> type[Objective]:
    """Raises ObjectiveError if there is no such class, or if it is no objective."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].implementation.partition(":")
        return cast(type[Objective], getattr(import_module(module), attribute))
    if problem := problem_of(name, {}):
        raise ObjectiveError(problem)
    try:
        kind = find(name)
    except NotFound as error:
        raise ObjectiveError(f"train.algorithm = {name}: {error}") from None
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        base = f"{Objective.__module__}.{Objective.__qualname__}"
        raise ObjectiveError(f"train.algorithm = {name}: it must be a subclass of {base}")
    if missing := sorted(kind.__abstractmethods__):
        raise ObjectiveError(
            f"train.algorithm = {name}: it has no method {' and no '.join(missing)}"
        )
    for method in ("advantages", "loss", "columns", "contributing"):
        wanted = list(inspect.signature(getattr(Objective, method)).parameters)
        try:
            inspect.signature(getattr(kind, method)).bind(*wanted)
        except TypeError as error:
            raise ObjectiveError(
                f"train.algorithm = {name}: {method} must take ({', '.join(wanted)}): {error}"
            ) from None
    return kind


def check_options(kind: type[Objective], name: str, options: dict[str, Any]) -> None:
    """Raises ObjectiveError that names the option of ``[objective]``, and what it may be."""
    try:
        kind.Options.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(map(str, first["loc"]))
        known = ", ".join(kind.Options.model_fields) or "none"
        raise ObjectiveError(
            f"objective.{option}: {first['msg']}. Options of {name}: {known}"
        ) from None
