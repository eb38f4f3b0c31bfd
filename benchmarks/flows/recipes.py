"""Recipes of the flows: what each trains on, and its settings beside those of the demo.

Batch sizes and learning rates are those that worked in a probe in plain PyTorch; the usual ``beta =
0.1`` of DPO is in the list because it collapses here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PAIRS, REWARD_PAIRS = 2048, 8000
"""Recorded pairs of the preference flows, and of the reward model."""
BATCH, REWARD_BATCH, REWARD_EPOCHS = 32, 64, 4
SAMPLED_STEPS = 100
"""Steps of 32 prompts with 8 samples: 25,600 samples."""


@dataclass(frozen=True, slots=True)
class Recipe:
    data: Literal["sampled", "pairs", "labels", "chosen", "reward_pairs"]
    """sampled: the demo's prompts. pairs: recorded pairs. labels: their completions one by one,
    each desirable or not. chosen: their better completions alone."""
    settings: Mapping[str, Any]
    steps: int
    gate: float | None = None
    """Gain in held-out accuracy that is asked for, or the accuracy over pairs of the reward model.
    """

    @property
    def checkpoint_every(self) -> int:
        """A divisor of the steps: the last three checkpoints are about an eighth of the run apart."""
        return next(n for n in range(max(1, self.steps // 8), 0, -1) if self.steps % n == 0)


def _recipe(
    data: Any, algorithm: str, lr: float, gate: float | None = None, **objective: Any
) -> Recipe:
    settings = {"train.algorithm": algorithm, "train.optimizer.lr": lr}
    settings |= {f"objective.{name}": value for name, value in objective.items()}
    steps = SAMPLED_STEPS if data == "sampled" else PAIRS // BATCH
    return Recipe(data, settings, steps, gate)


RECIPES: dict[str, Recipe] = {
    "grpo": _recipe("sampled", "grpo", 3e-4),
    "online_dpo": _recipe("sampled", "online_dpo", 1e-4, beta=0.5, pairs="all"),
    "online_dpo_one_pair": _recipe("sampled", "online_dpo", 1e-4, beta=0.5),
    "sft_on_chosen": _recipe("chosen", "sft", 3e-4),
    "dpo": _recipe("pairs", "dpo", 1e-4, 0.1, beta=1.0),
    "dpo_usual_beta": _recipe("pairs", "dpo", 1e-4, beta=0.1),
    "ipo": _recipe("pairs", "ipo", 1e-4, 0.1, beta=0.1),
    "kto": _recipe("labels", "kto", 1e-4, 0.1, beta=1.0),
    "orpo": _recipe("pairs", "orpo", 3e-4, 0.2, beta=0.1),
    "reward_model": Recipe(
        "reward_pairs",
        {
            "train.algorithm": "reward_model",
            "train.optimizer.lr": 1e-3,
            "train.optimizer.schedule": "linear",
            "train.optimizer.warmup_steps": 20,
        },
        REWARD_PAIRS * REWARD_EPOCHS // REWARD_BATCH,
        0.93,
    ),
}
