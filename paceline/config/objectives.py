"""Registry of the built-in objectives: everything that the rest of Paceline must know of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from paceline.config.fields import RowForm, Section
from paceline.config.sections.objective_options import (
    DistillOptions,
    DpoOptions,
    IpoOptions,
    KtoOptions,
    NoOptions,
    OrpoOptions,
    PpoOptions,
    RewardModelOptions,
)
from paceline.errors import did_you_mean

if TYPE_CHECKING:
    from paceline.config.sections.training import TrainConfig

TERMS = ("kl_coef", "entropy_coef", "overlong_filter")
"""Settings of ``[train.loss]`` that add a term to the loss, or take tokens out of it."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    implementation: str
    """Its class, as module:Class."""
    options: type[Section] = NoOptions
    """Settings of [objective]."""
    forms: tuple[RowForm, ...] = ()
    """Forms of recorded rows that it trains."""
    samples: bool = True
    """It can train completions that the policy samples."""
    preference: bool = False
    """It judges completions as a preference: train.loss.kl_coef is not for it."""
    groups_of_one: bool = False
    """It learns from one completion of a prompt alone, without a critic."""
    ignores: frozenset[str] = frozenset()
    """Settings of [train.loss] that it does not read."""
    reference: bool = False
    """It holds a frozen reference, whatever train.loss.kl_coef is."""
    critic: bool = False
    """It trains a critic beside the policy."""
    source: str = ""
    """Publication of a member of the GRPO family."""
    defines: Mapping[str, Any] = field(default_factory=dict)
    """Settings of [train] without which it would be another algorithm."""
    suggests: Mapping[str, Any] = field(default_factory=dict)
    """Defaults, as the source has them."""

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.defines, **self.suggests}


def _grpo(
    source: str, defines: Mapping[str, Any] | None = None, suggests: Mapping[str, Any] | None = None
) -> BuiltIn:
    implementation = "policy_worker.objectives.grpo:Grpo"
    return BuiltIn(implementation, source=source, defines=defines or {}, suggests=suggests or {})


def _preference(
    implementation: str,
    options: type[Section],
    *,
    forms: tuple[RowForm, ...] = (RowForm.PAIR,),
    samples: bool = True,
    reference: bool = False,
) -> BuiltIn:
    return BuiltIn(
        f"policy_worker.objectives.{implementation}",
        options,
        forms,
        samples,
        preference=True,
        groups_of_one=True,
        ignores=_SUPERVISED | {"aggregation", "branches"},
        reference=reference,
    )


_ADVANTAGES = frozenset({"advantage", "advantage_norm", "skip_zero_advantage"})
_RATIO = frozenset(
    {
        *("surrogate", "importance_level", "clip_low", "clip_high", "dual_clip", "proximal"),
        *("tis_cap", "mask_ratio_token", "mask_ratio_sequence"),
    }
)
_KL = frozenset({"kl_coef", "kl_estimator", "kl_in", "reference"})
_SUPERVISED = _ADVANTAGES | _RATIO | _KL | {"overlong_filter", "entropy_coef"}

# The importance weight is 1 on policy. Off policy it is truncated, and nothing is clipped.
_REINFORCE = {"loss.surrogate": "weight", "loss.clip_low": 1.0, "loss.clip_high": 1.0}

BUILT_IN: dict[str, BuiltIn] = {
    "grpo": _grpo("Shao et al., DeepSeekMath, arXiv 2402.03300"),
    "dr_grpo": _grpo(
        "Liu et al., arXiv 2503.20783",
        {"loss.aggregation": "dr_grpo", "loss.advantage_norm": False},
    ),
    "dapo": _grpo(
        "Yu et al., arXiv 2503.14476",
        {"loss.aggregation": "token_mean", "filter_uninformative": True},
        {"loss.clip_high": 0.28, "loss.overlong_filter": True},
    ),
    "gspo": _grpo(
        "Zheng et al., arXiv 2507.18071",
        {"loss.importance_level": "sequence"},
        {"loss.aggregation": "sequence_mean", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
    ),
    "cispo": _grpo(
        "MiniMax-M1, arXiv 2506.13585",
        {"loss.surrogate": "weight"},
        {"loss.aggregation": "token_mean", "loss.clip_low": 1.0, "loss.clip_high": 4.0},
    ),
    "rloo": _grpo(
        "Ahmadian et al., arXiv 2402.14740",
        {"loss.advantage": "leave_one_out", "loss.advantage_norm": False},
        {"loss.aggregation": "sequence_sum", **_REINFORCE},
    ),
    "reinforce++": _grpo(
        "Hu et al., arXiv 2501.03262", {"loss.advantage": "step"}, {"loss.kl_in": "reward"}
    ),
    "reinforce++-baseline": _grpo(
        "Hu et al., arXiv 2501.03262", {"loss.advantage": "group_step"}, {"loss.kl_in": "reward"}
    ),
    "ppo": BuiltIn(
        "policy_worker.objectives.ppo:Ppo",
        PpoOptions,
        ignores=_ADVANTAGES | {"overlong_filter", "kl_estimator", "kl_in"},
        critic=True,
    ),
    "distill": BuiltIn(
        "policy_worker.objectives.supervised:Distill",
        DistillOptions,
        ignores=_ADVANTAGES | {"overlong_filter", "entropy_coef"},
        groups_of_one=True,
    ),
    "sft": BuiltIn(
        "policy_worker.objectives.supervised:Sft",
        forms=(RowForm.CHAT, RowForm.COMPLETION),
        samples=False,
        ignores=_SUPERVISED | {"branches"},
    ),
    "dpo": _preference("preferences:Dpo", DpoOptions, reference=True),
    "online_dpo": _preference("preferences:Dpo", DpoOptions, forms=(), reference=True),
    "ipo": _preference("preferences:Ipo", IpoOptions, reference=True),
    "orpo": _preference("preferences:Orpo", OrpoOptions),
    "kto": _preference(
        "preferences:Kto", KtoOptions, forms=(RowForm.LABELLED, RowForm.PAIR), reference=True
    ),
    "reward_model": _preference("preferences:RewardModel", RewardModelOptions, samples=False),
}
"""The objectives by their name in ``train.algorithm``. The user's settings go before ``suggests``,
and may not contradict ``defines``."""

FAMILY = {name: entry for name, entry in BUILT_IN.items() if entry.source}
"""The GRPO family: one clipped policy-gradient loss under several names."""


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """[train] as the user wrote it, with its algorithm's defaults. Raises ValueError."""
    name = given.get("algorithm", "grpo")
    published = BUILT_IN.get(name) if isinstance(name, str) else None
    loss = given.get("loss", {})
    if published is None or not published.settings or not isinstance(loss, Mapping):
        return dict(given)
    flat = {**given, **{f"loss.{setting}": value for setting, value in loss.items()}}
    for setting, value in published.defines.items():
        if flat.get(setting, value) != value:
            raise ValueError(
                f"train.algorithm = {name} is defined by train.{setting} = {json.dumps(value)} "
                f"({published.source}): remove "
                f"train.{setting}, or set train.algorithm = grpo and each setting that you want"
            )
    defaults = published.settings
    of_loss = {n.removeprefix("loss."): v for n, v in defaults.items() if n.startswith("loss.")}
    of_train = {n: v for n, v in defaults.items() if not n.startswith("loss.")}
    return {**of_train, **given, "loss": {**of_loss, **loss}}


def problem_of(algorithm: str, options: Mapping[str, Any]) -> str:
    """The problem with the name, or with the options of a built-in objective; else empty."""
    if ":" in algorithm:
        return ""
    if algorithm not in BUILT_IN:
        meant = did_you_mean(algorithm, BUILT_IN)
        return (
            f"train.algorithm = {algorithm!r} is not an objective. {meant}Name one that is built "
            f"in ({', '.join(BUILT_IN)}), or a class of yours as package.module:Class"
        )
    section = BUILT_IN[algorithm].options
    for name in options:
        if name not in section.model_fields:
            names = ", ".join(section.model_fields)
            those = f"those of {algorithm} are {names}" if names else "it has none"
            told = f"objective.{name} is not an option of the objective {algorithm}"
            meant = did_you_mean(name, section.model_fields).rstrip()
            return f"{told}. {meant}" if meant else f"{told}: {those}"
    try:
        section.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(["objective", *map(str, first["loc"])])
        return f"{option}: {first['msg'].removeprefix('Value error, ')}"
    return ""


def ignored(train: TrainConfig) -> list[str]:
    """Settings of [train.loss] that were changed and that the objective does not read."""
    entry = BUILT_IN.get(train.algorithm)
    names = entry.ignores if entry else frozenset()
    fields = type(train.loss).model_fields
    return [n for n in fields if n in names and getattr(train.loss, n) != fields[n].default]
