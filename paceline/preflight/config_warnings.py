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
    unsaved = config.data.eval_path is not None and train.eval_every % train.checkpoint_every
    if unsaved:
        yield warn(
            "settings",
            f"train.eval_every = {train.eval_every} is no multiple of train.checkpoint_every = "
            f"{train.checkpoint_every}: most evaluations are of no checkpoint, and the best one of "
            "the run may not be kept",
            "Set train.eval_every to a multiple of train.checkpoint_every",
        )
    if not (filters and masks):
        if not unsaved:
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
