"""Losses against a plain loop over tokens, and their gradients against finite differences."""

import math

import numpy as np
import pytest
import torch

from policy_worker.objectives.advantages import group_advantages
from policy_worker.objectives.columns import TokenColumns, token_weights
from policy_worker.objectives.grpo import grpo_loss
from tests.fixtures.policy_models import make_config

LENGTHS = np.array([3, 1, 4, 2])


def columns_for(config, seed=0, dtype=torch.float64, reference=True):
    """Random columns of four sequences; the second token of the third one is an environment's."""
    rng = np.random.default_rng(seed)
    n = int(LENGTHS.sum())
    trained = np.ones(n, np.float32)
    trained[5] = 0
    weight = token_weights(trained, LENGTHS, 20, 8, config)
    sequence = np.repeat(np.arange(4), LENGTHS)
    tensors = {
        "behaviour": rng.uniform(-2, -0.2, n),
        "advantage": np.array([1.0, -0.5, 0.7, -1.2])[sequence],
        "weight": weight,
        "trained": trained,
        "staleness": rng.integers(0, 4, n),
    }
    logprobs = tensors["behaviour"] + rng.uniform(-0.8, 0.8, n)
    made = {k: torch.tensor(np.asarray(v), dtype=dtype) for k, v in tensors.items()}
    return torch.tensor(logprobs, dtype=dtype, requires_grad=True), TokenColumns(
        **made,
        sequence_of=torch.tensor(sequence),
        sequences=4,
        reference=torch.tensor(rng.uniform(-2, -0.2, n), dtype=dtype) if reference else None,
    )


def reference_loss(logprobs, c, config):
    """Token by token, as docs/algorithms.md writes it. Returns the loss and d loss / d logprob."""
    t = config.train.loss
    total, slopes = 0.0, []
    lp = logprobs.detach().tolist()
    ratios = {}
    for s in range(c.sequences):
        inside = [i for i in range(len(lp)) if c.sequence_of[i] == s and c.trained[i]]
        ratios[s] = math.exp(sum(lp[i] - c.behaviour[i].item() for i in inside) / len(inside))
    for i, logp in enumerate(lp):
        behaviour, advantage = c.behaviour[i].item(), c.advantage[i].item()
        weight, age = c.weight[i].item(), c.staleness[i].item()
        if t.proximal == "behaviour":
            prox, importance = behaviour, 1.0
        else:
            share = 0.0 if t.proximal == "trainer" or age == 0 else 1 / age
            prox = share * behaviour + (1 - share) * logp
            importance = math.exp(prox - behaviour)
            importance = 1.0 if t.tis_cap is None else min(importance, t.tis_cap)
        r = math.exp(logp - prox)
        clipped = min(max(r, 1 - t.clip_low), 1 + t.clip_high)
        value = min(r * advantage, clipped * advantage)
        slope = r * advantage if r * advantage <= clipped * advantage else 0.0
        if t.dual_clip is not None and advantage < 0 and r > t.dual_clip:
            value, slope = t.dual_clip * advantage, 0.0
        value, slope = value * importance, slope * importance
        own = math.exp(logp - behaviour)
        if t.mask_ratio_token and not t.mask_ratio_token[0] <= own <= t.mask_ratio_token[1]:
            value = slope = 0.0
        seq = ratios[int(c.sequence_of[i])]
        if (
            t.mask_ratio_sequence
            and not t.mask_ratio_sequence[0] <= seq <= t.mask_ratio_sequence[1]
        ):
            value = slope = 0.0
        total -= weight * value
        slope *= -weight
        if c.reference is not None:
            x = c.reference[i].item() - logp
            kl = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[t.kl_estimator]
            dkl = {"k1": 1.0, "k2": -x, "k3": 1 - math.exp(x)}[t.kl_estimator]
            sampled = own if t.tis_cap is None else min(own, t.tis_cap)
            total += t.kl_coef * weight * sampled * kl
            slope += t.kl_coef * weight * sampled * dkl
        slopes.append(slope)
    return total, slopes


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip_low": 0.1, "clip_high": 0.4},
        {"kl_coef": 0.3, "kl_estimator": "k1"},
        {"kl_coef": 0.3, "kl_estimator": "k2"},
        {"kl_coef": 0.3, "kl_estimator": "k3"},
        {"kl_coef": 0.3, "kl_estimator": "k3", "tis_cap": 1.1},
        {"kl_coef": 0.3, "kl_estimator": "k3", "tis_cap": None, "proximal": "trainer"},
        {"dual_clip": None},
        {"dual_clip": 1.3},
        {"dual_clip": 1.05, "proximal": "interpolated", "clip_low": 0.1},
        {"proximal": "trainer"},
        {"proximal": "trainer", "tis_cap": None},
        {"proximal": "trainer", "tis_cap": 1.1},
        {"proximal": "interpolated", "tis_cap": 1.3},
        {"mask_ratio_token": (0.7, 1.4)},
        {"mask_ratio_sequence": (0.9, 1.2), "proximal": "trainer"},
        {"mask_ratio_sequence": (0.8, 1.3), "mask_ratio_token": (0.6, 1.5)},
    ],
    ids=str,
)
def test_loss_and_gradient_equal_the_formula_token_by_token(aggregation, changes):
    config = make_config(train={"aggregation": aggregation, **changes}, rollout={"max_tokens": 16})
    for seed in range(3):
        logprobs, columns = columns_for(config, seed, reference="kl_coef" in changes)
        loss = grpo_loss(logprobs, columns, config.train.loss)
        loss.total.backward()
        value, slopes = reference_loss(logprobs, columns, config)
        assert loss.total.item() == pytest.approx(value, rel=1e-6)
        assert logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-9)


def test_dr_grpo_with_an_environment_divides_by_the_bound_of_the_transcript():
    """``max_tokens`` bounds a turn: a transcript of 100 tokens would weigh 6.25 instead of 1 at
    most."""
    rollout = {"max_tokens": 16, "max_context": 128, "environment": "math:sqrt"}
    config = make_config(train={"aggregation": "dr_grpo"}, rollout=rollout)
    weights = token_weights(np.ones(100, np.float32), np.array([100]), 100, 1, config)
    assert weights.sum() == pytest.approx(100 / 128)


def test_advantages_by_hand():
    reward = np.array([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0])
    sizes = np.array([4, 3])
    raw = group_advantages(reward, sizes, normalise=False)
    assert raw.tolist() == [0.5, -0.5, -0.5, 0.5, 0, 0, 0]
    normal = group_advantages(reward, sizes, normalise=True)
    deviation = math.sqrt(1 / 3)
    assert normal[:4].tolist() == pytest.approx((raw[:4] / (deviation + 1e-4)).tolist())
    assert normal[4:].tolist() == [0, 0, 0]
    assert (group_advantages(np.full(7, 0.1), np.array([7]), normalise=True) == 0).all()
    assert group_advantages(np.array([3.0]), np.array([1]), normalise=False).tolist() == [0.0]


def test_extreme_ratios_stay_finite_and_are_counted():
    config = make_config(train={"kl_coef": 0.1})
    logprobs = torch.tensor([-0.1, -500.0], requires_grad=True)
    columns = TokenColumns(
        behaviour=torch.tensor([-400.0, -0.1]),
        advantage=torch.tensor([-1.0, -1.0]),
        weight=torch.ones(2),
        trained=torch.ones(2),
        staleness=torch.zeros(2),
        sequence_of=torch.tensor([0, 1]),
        sequences=2,
        reference=torch.tensor([-400.0, -0.1]),
    )
    loss = grpo_loss(logprobs, columns, config.train.loss)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert torch.isfinite(logprobs.grad).all()
    assert loss.measured["dual_clip_fraction"].tolist() == [1, 0]
