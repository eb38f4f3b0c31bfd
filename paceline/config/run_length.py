"""Run length: the steps of a run."""

import math

from paceline.config.schema import Config
from paceline.errors import BadInput


def run_steps(config: Config, rows: int) -> int:
    """Steps of a run over ``rows`` training rows. Raises BadInput if the warm-up is longer."""
    train = config.train
    if train.epochs is not None:
        # The product of a fraction like 0.1 may be a little above the whole number that is meant.
        prompts = train.epochs * rows * (1 - 1e-12)
        steps = max(1, math.ceil(prompts / train.groups_per_step))
        said = f"train.epochs = {train.epochs:g} over {rows} rows"
    elif train.max_samples is not None:
        steps = train.max_samples // config.samples_per_step
        said = f"train.max_samples = {train.max_samples}"
    else:
        assert train.steps is not None
        return train.steps
    if train.optimizer.warmup_steps > steps:
        raise BadInput(
            f"train.optimizer.warmup_steps = {train.optimizer.warmup_steps} is larger than the "
            f"run, which has {steps} steps ({said})"
        )
    return steps


def length_in_words(config: Config, rows: int) -> str:
    """ "96 steps of 32 groups x 8 completions: 24,576 samples, 3 epochs of 1,024 rows"."""
    train, steps = config.train, run_steps(config, rows)
    groups = steps * train.groups_per_step
    return (
        f"{steps:,} steps of {train.groups_per_step} groups x {config.rollout.group_size} "
        f"completions: {steps * config.samples_per_step:,} samples, {round(groups / rows, 2):,g} "
        f"epochs of {rows:,} row{'s' * (rows > 1)}"
    )
