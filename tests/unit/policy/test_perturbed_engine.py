"""An engine that disagrees with the trainer: what corrects for it keeps training stable.

The policy is a table of logits, so that a whole training takes a second and everything but the loss
is beyond doubt. The engine samples from logits with fresh noise and reports the log-probs of what
it sampled from, as an engine of low precision does.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from policy_worker.objectives.advantages import group_advantages
from policy_worker.objectives.columns import TokenColumns
from policy_worker.objectives.grpo import grpo_loss
from tests.fixtures.policy_models import make_config

LENGTH, VOCABULARY, GROUP, PROMPTS, STEPS = 6, 12, 8, 16, 150
NOISE = 4.0

# The dual clip is off: it bounds some of the same ratios, and so hides what a correction does.
PLAIN: dict[str, Any] = {"proximal": "behaviour", "dual_clip": None}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "truncated importance sampling": {**PLAIN, "proximal": "trainer", "tis_cap": 2.0},
    "token mask": {**PLAIN, "mask_ratio_token": (0.5, 2.0)},
    "importance sampling and sequence mask": {
        **PLAIN,
        "proximal": "trainer",
        "tis_cap": 2.0,
        "mask_ratio_sequence": (0.2, 5.0),
    },
}


@dataclass
class Learned:
    mean: float
    """Probability of the right token, over the whole training."""
    worst: float
    """Its minimum in the second half."""


def train(noise: float, **changes: Any) -> Learned:
    config = make_config(train=changes).train.loss
    draw = torch.Generator().manual_seed(0)
    logits = torch.zeros(LENGTH, VOCABULARY, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    right = torch.randint(VOCABULARY, (LENGTH,), generator=draw)
    sequences = PROMPTS * GROUP
    tokens = sequences * LENGTH
    history = []
    for _ in range(STEPS):
        shape = (sequences, LENGTH, VOCABULARY)
        engine = (logits.detach() + noise * torch.randn(shape, generator=draw)).log_softmax(-1)
        flat = engine.exp().reshape(-1, VOCABULARY)
        sampled = torch.multinomial(flat, 1, generator=draw).reshape(sequences, LENGTH, 1)
        reward = (sampled[..., 0] == right).double().mean(-1).numpy()
        advantage = group_advantages(reward, np.full(PROMPTS, GROUP), normalise=True)
        columns = TokenColumns(
            behaviour=engine.gather(-1, sampled).reshape(-1),
            advantage=torch.tensor(advantage, dtype=torch.float32).repeat_interleave(LENGTH),
            weight=torch.full((tokens,), 1 / tokens),
            trained=torch.ones(tokens),
            staleness=torch.zeros(tokens),
            sequence_of=torch.arange(sequences).repeat_interleave(LENGTH),
            sequences=sequences,
        )
        policy = logits.log_softmax(-1).expand(shape).gather(-1, sampled).reshape(-1)
        optimizer.zero_grad()
        grpo_loss(policy, columns, config).total.backward()
        torch.nn.utils.clip_grad_norm_([logits], 1.0)
        optimizer.step()
        with torch.no_grad():
            history.append(float(logits.softmax(-1).gather(-1, right[:, None]).mean()))
    return Learned(float(np.mean(history)), min(history[STEPS // 2 :]))


@pytest.mark.parametrize("changes", CORRECTIONS.values(), ids=CORRECTIONS)
def test_a_perturbed_engine_trains_stably_with_correction_and_visibly_worse_without(
    changes: dict[str, Any],
) -> None:
    with_correction, without = train(NOISE, **changes), train(NOISE, **PLAIN)
    assert with_correction.worst > 0.97
    assert without.worst < 0.85
    assert with_correction.mean > without.mean + 0.1


@pytest.mark.parametrize("changes", CORRECTIONS.values(), ids=CORRECTIONS)
def test_corrections_cost_nothing_where_engine_and_trainer_agree(changes: dict[str, Any]) -> None:
    found, plain = train(0.0, **changes), train(0.0, **PLAIN)
    assert found.mean == pytest.approx(plain.mean, abs=1e-4)
    assert found.worst == pytest.approx(plain.worst, abs=1e-4)
