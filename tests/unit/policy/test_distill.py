"""On-policy distillation and the remote reference: losses against plain loops, and columns that are
checked."""

import math

import numpy as np
import pytest
import torch

from paceline.config.schema import Config
from policy_worker.objectives.batch import BadGroup
from policy_worker.objectives.columns import TokenScores
from policy_worker.objectives.load import load_objective
from policy_worker.rows.group_reading import decode
from policy_worker.rows.packing import pack
from policy_worker.toy_step import CPU, random_groups, totals_of
from tests.fixtures.configs import config_of


def config(algorithm: str = "distill", **train: object) -> Config:
    return config_of(
        train={"algorithm": algorithm, "max_staleness": 2, **train},
        rollout={"group_size": 4, "max_tokens": 16},
        scorers={"teacher": {"kind": "logprobs", "path": "toy"}},
    )


def test_the_loss_is_the_policy_gradient_of_the_reverse_kl() -> None:
    """Against a loop over tokens: clip(ratio) x (log teacher - log policy), mean over the step's
    tokens."""
    settings = config()
    groups = random_groups(np.random.default_rng(3))
    objective = load_objective(settings)
    batch, totals = decode(groups), totals_of(groups)
    columns = objective.columns(batch, totals)
    micro = pack(batch, np.arange(len(batch.length)), CPU)
    tokens = columns.of(micro, CPU, None)
    draw = 0.3 * torch.randn(len(batch.behaviour), generator=torch.Generator().manual_seed(1))
    logprobs = (tokens.behaviour + draw).requires_grad_()
    before = logprobs.detach()
    found = objective.loss(TokenScores(logprobs, torch.zeros_like(before), before), tokens)
    found.total.backward()

    total, gradient = 0.0, []
    train = settings.train
    for i in range(len(before)):
        policy, behaviour = float(before[i]), float(tokens.behaviour[i])
        advantage = float(tokens.scored["teacher"][i]) - policy
        ratio = math.exp(policy - behaviour)
        low, high = 1 - train.loss.clip_low, 1 + train.loss.clip_high
        clipped = min(max(ratio, low), high) * advantage
        objective_value, slope = ratio * advantage, ratio * advantage
        if clipped < objective_value:
            objective_value, slope = clipped, 0.0
        assert train.loss.dual_clip is not None and train.loss.tis_cap is not None
        if advantage < 0 and ratio * advantage < train.loss.dual_clip * advantage:
            objective_value, slope = train.loss.dual_clip * advantage, 0.0
        weight = float(tokens.trained[i]) / totals.tokens
        total -= objective_value * weight
        gradient.append(-slope * weight)
    assert float(found.total.detach()) == pytest.approx(total, abs=1e-5)
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.tensor(gradient), atol=1e-5)


def test_a_remote_reference_replaces_the_model_of_the_trainer() -> None:
    torch.set_num_threads(1)
    settings = config("grpo", kl_coef=0.1, reference="scorer:teacher")
    objective = load_objective(settings)
    assert objective.frozen == ()
    batch = decode(groups := random_groups(np.random.default_rng(3)))
    columns = objective.columns(batch, totals_of(groups))
    micro = pack(batch, np.arange(len(batch.length)), CPU)
    found = columns.of(micro, CPU, None).reference
    assert torch.equal(found, torch.from_numpy(batch.scored["teacher"][micro.token_index]))


def test_groups_without_the_teachers_numbers_are_refused() -> None:
    groups = random_groups(np.random.default_rng(3))
    groups[2].completions[1].columns["teacher"] = b"\0" * 4
    with pytest.raises(BadGroup, match=r"group t2: .*scorers") as error:
        decode(groups)
    assert error.value.groups == (("t2", 1),)
    for group in groups:
        for completion in group.completions:
            completion.columns.clear()
    with pytest.raises(BadGroup, match="no log-probs of the scorer teacher"):
        load_objective(config()).advantages(decode(groups), totals_of(groups))
