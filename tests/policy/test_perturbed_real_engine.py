"""An engine whose weights are not the trainer's: what corrects for it keeps training stable.

test_perturbed_engine.py shows this of the loss alone, on a table of logits. Here the engine, the model,
the advantages, the packing and the optimizer are those of a run; only the fleet is missing.

The engine samples from the trainer's weights plus noise of NOISE times their own spread, other noise
after every step. It is then often sure of what the trainer holds for unlikely, and the other way round:
ratios of e^10 and more, which the clip bounds on one side only. The loss as it is by default then
unlearns right answers as soon as it has learned them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.perturbed_training import LENGTH, Learned, train_against
from tests.helpers.tiny_model import make_endless_model

NOISE, STEPS, LR = 3.0, 120, 3e-3
PLAIN: dict[str, Any] = {"proximal": "behaviour"}
CORRECTED = [
    pytest.param({"proximal": "trainer", "tis_cap": 2.0}, id="truncated importance sampling"),
    pytest.param({"proximal": "behaviour", "mask_ratio_token": (0.5, 2.0)}, id="token mask"),
    pytest.param(
        {"proximal": "trainer", "tis_cap": 2.0, "mask_ratio_sequence": (0.5, 2.0)},
        id="importance sampling and sequence mask",
    ),
]


def sevens(completion: str) -> float:
    """Share of sevens: a fifteenth, before anything is learned."""
    return completion.count("7") / LENGTH


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_endless_model(tmp_path_factory.mktemp("model"))


async def train(model: Path, noise: float, **changes: Any) -> Learned:
    return await train_against(model, sevens, noise=noise, steps=STEPS, lr=LR, **changes)


async def test_without_noise_the_default_loss_learns(model: Path) -> None:
    learned = await train(model, 0.0, **PLAIN)
    assert max(learned.gap) < 1e-3
    assert learned.end > 0.9


async def test_a_perturbed_engine_makes_the_default_loss_visibly_worse(model: Path) -> None:
    learned = await train(model, NOISE, **PLAIN)
    assert max(learned.gap) > 1.0
    assert learned.end < 0.75


@pytest.mark.parametrize("changes", CORRECTED)
async def test_a_perturbed_engine_trains_stably_with_correction(
    model: Path, changes: dict[str, Any]
) -> None:
    learned = await train(model, NOISE, **changes)
    assert max(learned.gap) > 1.0
    assert learned.end > 0.85
