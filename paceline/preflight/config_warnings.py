"""Settings that are valid one by one and contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config.schema import Config
from paceline.preflight.check import Check, ok, warn


def config_warnings(config: Config) -> Iterator[Check]:
    rollout, train = config.rollout, config.train
    limits = {
        "top_p": (rollout.top_p, rollout.top_p < 1),
        "top_k": (rollout.top_k, rollout.top_k > 0),
    }
    filters = [f"rollout.{n} = {value:g}" for n, (value, applies) in limits.items() if applies]
    names = ("mask_ratio_sequence", "mask_ratio_token")
    masks = [f"train.{name}" for name in names if getattr(train, name) is not None]
    if not (filters and masks):
        yield ok("settings", "none contradicts another")
        return
    # A kept token has at least its whole-distribution probability once the rest is cut away.
    yield warn(
        "settings",
        f"{' and '.join(filters)} with {' and '.join(masks)}: the sampler truncates the "
        "distribution and the trainer's log-probs are of the whole one. The ratios that are masked "
        "by then lie below 1 even if nothing is stale",
        "Sample with top_p = 1 and top_k = 0, or remove the masks",
    )
