"""Length of a run before it starts: its steps, whatever setting gives them."""

from __future__ import annotations

from paceline.config.run_length import run_steps
from paceline.config.schema import Config
from paceline.dataset.training_rows import open_training_rows


def steps_of(config: Config) -> int:
    """Optimizer steps of the run. Opens the data if train.epochs is its length. Raises BadInput."""
    rows = 0 if config.train.epochs is None else len(open_training_rows(config.data).rows)
    return run_steps(config, rows)
