"""Settings that are allowed and, taken together, seldom what is meant."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.schema import Config


@dataclass(frozen=True, slots=True)
class ConfigWarning:
    found: str
    """Begins with the setting."""
    remedy: str


def concerns(config: Config) -> list[ConfigWarning]:
    rollout, train = config.rollout, config.train
    found = []
    filters = [
        f"rollout.{name} = {value:g}"
        for name, value, applies in (
            ("top_p", rollout.top_p, rollout.top_p < 1),
            ("top_k", rollout.top_k, rollout.top_k > 0),
        )
        if applies
    ]
    masks = [
        f"train.{name}"
        for name in ("mask_ratio_sequence", "mask_ratio_token")
        if getattr(train, name) is not None
    ]
    if filters and masks:
        # A kept token has at least its whole-distribution probability once the rest is cut away.
        found.append(
            ConfigWarning(
                f"{' and '.join(filters)} with {' and '.join(masks)}: tokens are drawn from a "
                "truncated distribution and the trainer's log-probs are of the whole one, so the "
                "ratios that are masked by lie below 1 even where nothing is stale",
                "sample with top_p = 1 and top_k = 0, or leave the masks out",
            )
        )
    return found
