"""An engine whose weights are not the trainer's: what corrects for it keeps training stable.

test_perturbed_engine.py shows this of the loss alone, on a table of logits. Here the engine, the
model, the advantages, the packing and the optimizer are those of a run; only the fleet is missing.

The engine samples from the trainer's weights plus noise of NOISE times their own spread, other
noise after every step. It then often draws tokens of bad samples that the trainer is surer of than
the engine was: their ratio is large, and without the dual clip nothing bounds it if the advantage
is negative. The plain loss so unlearns what it has learned. Ends: plain loss 0.42 to 0.57 and token
mask 0.96 to 0.99, six seeds each; with bounds of 0.2 and 5 instead, 0.45 to 0.63; truncated
importance sampling above 0.99, three.

Two things this setting does not show. Masking by sequence is no help alone (0.41 to 0.45), as the
geometric mean of a sequence hides one broken token; beside importance sampling it costs nothing.
And without any weight at all the reward ends as high as with the truncated one: what suffers is the
gap.
"""

from pathlib import Path
from typing import Any

import pytest

from testbed.tiny_model import make_endless_model
from tests.fixtures.corrections import CORRECTIONS, PLAIN
from tests.fixtures.perturbed_training import LENGTH, Learned, train_against

pytestmark = pytest.mark.long

NOISE, STEPS, LR = 3.0, 120, 3e-3


def sevens(completion: str) -> float:
    """Share of sevens: a fifteenth, before anything is learned."""
    return completion.count("7") / LENGTH


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_endless_model(tmp_path_factory.mktemp("model"))


async def train(model: Path, noise: float, **changes: Any) -> Learned:
    return await train_against(model, sevens, noise=noise, steps=STEPS, lr=LR, **changes)


async def test_a_perturbed_engine_makes_the_plain_loss_visibly_worse(model: Path) -> None:
    learned = await train(model, NOISE, **PLAIN)
    assert learned.end < 0.75


@pytest.mark.parametrize(
    "changes",
    [
        # In every run: one of them here, all of them in test_perturbed_engine.py
        pytest.param(changes, id=name, marks=() if name == "token mask" else pytest.mark.slow)
        for name, changes in CORRECTIONS.items()
    ],
)
async def test_a_perturbed_engine_trains_stably_with_correction(
    model: Path, changes: dict[str, Any]
) -> None:
    learned = await train(model, NOISE, **changes)
    assert 1.0 < max(learned.gap) < 15.0
    assert learned.end > 0.85
