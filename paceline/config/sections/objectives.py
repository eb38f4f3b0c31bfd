"""Objectives by name, and the options of those that are built in.

An objective of a user is named as ``package.module:Class``, and its options are in its class: they
are checked where the class can be imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from paceline.config.algorithms import FAMILY
from paceline.config.fields import Section
from paceline.config.sections.ppo import PpoOptions
from paceline.config.sections.preference_objectives import PREFERENCES


class ObjectiveConfig(Section):
    """The options of the objective that train.algorithm names."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class NoOptions(Section):
    """An objective whose settings are those of ``[train]``."""


class DistillOptions(Section):
    """On-policy distillation (docs/scorers.md)."""

    teacher: str = "teacher"
    """Scorer, of kind logprobs, whose distribution the policy learns."""
    most_advantage: Annotated[float, Field(gt=0)] = 10.0
    """Largest magnitude of a token's advantage, log teacher - log policy, in nats."""


BUILT_IN: dict[str, type[Section]] = {
    **dict.fromkeys(FAMILY, NoOptions),
    "ppo": PpoOptions,
    "sft": NoOptions,
    "distill": DistillOptions,
    **PREFERENCES,
}


def problem_of(algorithm: str, options: Mapping[str, Any]) -> str:
    """What is wrong with the name, or with the options of a built-in objective; empty if nothing
    is."""
    if algorithm not in BUILT_IN:
        return "" if ":" in algorithm else _unknown(algorithm)
    known = BUILT_IN[algorithm].model_fields
    for name in options:
        if name not in known:
            those = f"those of {algorithm} are {', '.join(known)}" if known else "it has none"
            return f"objective.{name} is not an option of the objective {algorithm}: {those}"
    try:
        BUILT_IN[algorithm].model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(["objective", *map(str, first["loc"])])
        return f"{option}: {first['msg'].removeprefix('Value error, ')}"
    return ""


def _unknown(algorithm: str) -> str:
    return (
        f"train.algorithm = {algorithm!r} is not an objective: name one that is built in ({', '.join(BUILT_IN)}), or a "
        "class of yours as package.module:Class"
    )
