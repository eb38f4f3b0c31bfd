"""The GRPO family: the settings of ``[train.loss]`` that each published name stands for.

All of them are one clipped policy-gradient loss with other settings. A name gives defaults, and a
setting of the user's own goes before them; but a name cannot be used with a setting that
contradicts what defines it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Published:
    """One member of the family."""

    source: str
    defines: Mapping[str, Any] = field(default_factory=dict)
    """Settings of [train] without which it would be another algorithm."""
    suggests: Mapping[str, Any] = field(default_factory=dict)
    """Defaults, as the source has them."""

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.defines, **self.suggests}


# The importance weight is 1 on policy. Off policy it is truncated, and nothing is clipped.
_REINFORCE = {"loss.surrogate": "weight", "loss.clip_low": 1.0, "loss.clip_high": 1.0}

FAMILY: dict[str, Published] = {
    "grpo": Published("Shao et al., DeepSeekMath, arXiv 2402.03300"),
    "dr_grpo": Published(
        "Liu et al., arXiv 2503.20783",
        {"loss.aggregation": "dr_grpo", "loss.advantage_norm": False},
    ),
    "dapo": Published(
        "Yu et al., arXiv 2503.14476",
        {"loss.aggregation": "token_mean", "filter_uninformative": True},
        {"loss.clip_high": 0.28, "loss.overlong_filter": True},
    ),
    "gspo": Published(
        "Zheng et al., arXiv 2507.18071",
        {"loss.importance_level": "sequence"},
        {"loss.aggregation": "sequence_mean", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
    ),
    "cispo": Published(
        "MiniMax-M1, arXiv 2506.13585",
        {"loss.surrogate": "weight"},
        {"loss.aggregation": "token_mean", "loss.clip_low": 1.0, "loss.clip_high": 4.0},
    ),
    "rloo": Published(
        "Ahmadian et al., arXiv 2402.14740",
        {"loss.advantage": "leave_one_out", "loss.advantage_norm": False},
        {"loss.aggregation": "sequence_sum", **_REINFORCE},
    ),
    "reinforce++": Published(
        "Hu et al., arXiv 2501.03262", {"loss.advantage": "step"}, {"loss.kl_in": "reward"}
    ),
    "reinforce++-baseline": Published(
        "Hu et al., arXiv 2501.03262", {"loss.advantage": "group_step"}, {"loss.kl_in": "reward"}
    ),
}


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given``: the table ``[train]`` as the user wrote it. Raises ValueError if a setting
    contradicts the algorithm."""
    name = given.get("algorithm", "grpo")
    published = FAMILY.get(name) if isinstance(name, str) else None
    loss = given.get("loss", {})
    if published is None or not isinstance(loss, Mapping):
        return dict(given)
    flat = {**given, **{f"loss.{setting}": value for setting, value in loss.items()}}
    for setting, value in published.defines.items():
        if flat.get(setting, value) != value:
            raise ValueError(
                f"train.algorithm = {name} is defined by train.{setting} = {_toml(value)} ({published.source}): remove "
                f"train.{setting}, or set train.algorithm = grpo and each setting that you want"
            )
    defaults = published.settings
    of_loss = {n.removeprefix("loss."): v for n, v in defaults.items() if n.startswith("loss.")}
    of_train = {n: v for n, v in defaults.items() if not n.startswith("loss.")}
    return {**of_train, **given, "loss": {**of_loss, **loss}}


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
