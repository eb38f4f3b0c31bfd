"""Tokens that an environment said: inputs like any other, and nothing else.

What the trainer computes of a step with masked tokens is compared with a computation by hand: one
sequence at a time, through the model's plain forward, over the model's own tokens only.
"""

import math

import numpy as np
import pytest
import torch

from paceline.payloads.group_limits import GroupLimits
from policy_worker.objectives.batch import StepTotals
from tests.fixtures.group_meta import accepted
from tests.fixtures.policy_models import make_config, make_group, tiny_network
from tests.fixtures.training_steps import flat, keys, make_gradients

PROMPT = [1, 5, 9]
TOKENS = [[3, 4, 5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15]]
MASKS = [[1, 1, 0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1]]
"""Said in the middle, said first, nothing said."""
REWARDS = [1.0, 0.0, 0.25]
TRAINED = 8


def behaviour(seed: int) -> list[list[float]]:
    """Near what the network says where the model spoke; 0 where the environment did."""
    rng = np.random.default_rng(seed)
    return [
        [float(-3 + 0.3 * rng.standard_normal()) if made else 0.0 for made in mask]
        for mask in MASKS
    ]


def make_masked(seed: int, **changes):
    parts = {"tokens": TOKENS, "logprobs": behaviour(seed), "masks": MASKS, **changes}
    return make_group(
        "t0",
        PROMPT,
        parts["tokens"],
        REWARDS,
        logprobs=parts["logprobs"],
        masks=parts["masks"],
    )


def by_hand(config, seed, reference):
    """Loss, gradient and statistics over the model's own tokens."""
    model, train = tiny_network("qwen3"), config.train
    std = float(np.std(REWARDS, ddof=1))
    advantages = [(r - float(np.mean(REWARDS))) / (std + 1e-4) for r in REWARDS]
    loss = torch.zeros(())
    seen = {name: [] for name in ("entropy", "ratio", "logprob_gap", "clip_fraction", "kl")}
    seen |= {"logprob_gap_fresh": [], "kl_behaviour": []}
    for tokens, mask, old, advantage in zip(
        TOKENS, MASKS, behaviour(seed), advantages, strict=True
    ):
        ids = torch.tensor([PROMPT + tokens])
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0], -1)
        with torch.no_grad():
            other = torch.log_softmax(reference(input_ids=ids, use_cache=False).logits[0], -1)
        own = sum(mask)
        for j, made in enumerate(mask):
            if not made:
                continue
            row = logp[len(PROMPT) + j - 1]
            chosen = row[tokens[j]]
            r = (chosen - old[j]).exp()
            low, high = r * advantage, r.clamp(0.8, 1.2) * advantage
            log_r = other[len(PROMPT) + j - 1][tokens[j]] - chosen
            kl = r.detach().clamp(max=2.0) * (log_r.exp() - 1 - log_r)
            share = {
                "token_mean": 1 / TRAINED,
                "sequence_mean": 1 / (own * len(TOKENS)),
                "dr_grpo": 1 / (config.rollout.max_tokens * len(TOKENS)),
            }[train.loss.aggregation]
            loss = loss + share * (train.loss.kl_coef * kl - torch.minimum(low, high))
            seen["entropy"].append(float(-(row.exp() * row).sum().detach()))
            seen["ratio"].append(float(r.detach()))
            seen["logprob_gap"].append(abs(float(chosen.detach()) - old[j]))
            seen["logprob_gap_fresh"].append(seen["logprob_gap"][-1])
            seen["kl_behaviour"].append(float(r.detach() - 1 - r.detach().log()))
            seen["clip_fraction"].append(float((high < low).detach()))
            seen["kl"].append(float(kl.detach()))
    loss.backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    return float(loss.detach()), gradient, seen


def by_trainer(config, group, reference=None):
    gradients = make_gradients(config, frozen=reference and {"reference": reference})
    # As the controller counts them.
    meta = accepted(group, GroupLimits.of(config), 10)
    gradients.begin(StepTotals(1, 0, meta.tokens, meta.sequences), keys([group]))
    gradients.add([group])
    return gradients.stats, flat(gradients)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
def test_a_step_with_masked_tokens_equals_one_computed_by_hand(aggregation):
    config = make_config(train={"aggregation": aggregation, "kl_coef": 0.1})
    reference = tiny_network("qwen3", seed=9)
    loss, gradient, seen = by_hand(config, 1, reference)
    stats, got = by_trainer(config, make_masked(1), reference)
    assert stats.mean("loss") == pytest.approx(loss, rel=1e-4)
    torch.testing.assert_close(got, gradient, atol=2e-7, rtol=2e-4)
    for name, values in seen.items():
        total, weight, largest = stats.entries[name]
        assert weight == TRAINED == len(values)
        assert total / weight == pytest.approx(sum(values) / TRAINED, rel=1e-4, abs=1e-6), name
        if name in ("ratio", "logprob_gap", "logprob_gap_fresh"):
            assert largest == pytest.approx(max(values), rel=1e-4), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask_ratio_token": (0.5, 2.0)},
        {"mask_ratio_sequence": (0.5, 2.0)},
        {"proximal": "trainer"},
        {"proximal": "interpolated"},
    ],
    ids=str,
)
def test_log_probs_of_masked_tokens_have_no_influence_whatever_they_are(changes):
    """Neither in the loss, nor by masks of ratio, nor by importance weights."""
    config = make_config(train=changes)
    wild = [
        [value if made else -700.0 for value, made in zip(row, mask, strict=True)]
        for row, mask in zip(behaviour(2), MASKS, strict=True)
    ]
    stats, gradient = by_trainer(config, make_masked(2))
    other_stats, other = by_trainer(config, make_masked(2, logprobs=wild))
    assert torch.equal(gradient, other) and gradient.abs().max() > 0
    assert other_stats.entries == stats.entries
    assert all(math.isfinite(x) for entry in stats.entries.values() for x in entry)
