"""Settings of ``[train.loss]`` that a built-in objective does not read.

A term of the loss that would be missing without a word is refused. A detail of a term that an
objective does not have is worth a warning: it may be left from another algorithm.
"""

from __future__ import annotations

from paceline.config.sections.preference_objectives import PREFERENCES
from paceline.config.sections.training import LossConfig, TrainConfig

TERMS = ("kl_coef", "entropy_coef", "overlong_filter", "covariance")
"""Settings that add a term to the loss, or take tokens out of it."""

_ADVANTAGES = frozenset({"advantage", "advantage_norm", "skip_zero_advantage"})
_TOKENS = frozenset({"overlong_filter", "covariance"})
_RATIO = frozenset(
    {
        *("surrogate", "importance_level", "clip_low", "clip_high", "dual_clip", "proximal"),
        *("tis_cap", "mask_ratio_token", "mask_ratio_sequence"),
    }
)
_KL = frozenset({"kl_coef", "kl_estimator", "kl_in", "reference"})
_SUPERVISED = _ADVANTAGES | _TOKENS | _RATIO | _KL | {"entropy_coef"}

IGNORED: dict[str, frozenset[str]] = {
    "ppo": _ADVANTAGES | _TOKENS | {"kl_estimator", "kl_in"},
    "distill": _ADVANTAGES | _TOKENS | {"entropy_coef"},
    "sft": _SUPERVISED,
    **dict.fromkeys(PREFERENCES, _SUPERVISED | {"aggregation"}),
}
"""By objective. The GRPO family reads all of them; what an objective of a user reads is not known.
"""


def ignored(train: TrainConfig) -> list[str]:
    """Names of the settings that are not at their defaults, and that the objective does not read."""
    names = IGNORED.get(train.algorithm, frozenset())
    return [
        name
        for name, field in LossConfig.model_fields.items()
        if name in names and getattr(train.loss, name) != field.default
    ]


def problem_of_ignored(train: TrainConfig) -> str:
    """The terms of the loss that the objective would leave out, with the remedy; empty if there is
    none."""
    missing = [f"train.loss.{name}" for name in ignored(train) if name in TERMS]
    if not missing:
        return ""
    them = "it" if len(missing) == 1 else "them"
    return (
        f"{' and '.join(missing)}: train.algorithm = {train.algorithm} has no such term in its loss. Remove {them}, or "
        f"choose another algorithm (docs/algorithms.md)"
    )
