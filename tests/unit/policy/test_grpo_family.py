"""The GRPO family against TRL 1.16 and against loops written from the papers, values and gradients.

The fixture holds what TRL's trainers gave for six completions of unequal lengths, two with a masked
token: loss and gradient by log-prob, float32.
"""

import json
import math
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from paceline.config.objectives import FAMILY
from paceline.config.sections.training import LossConfig, TrainConfig
from policy_worker.objectives.advantages import EPSILON, advantages_of, chosen_tokens
from policy_worker.objectives.batch import StepTotals
from policy_worker.objectives.columns import TokenColumns, token_weights
from policy_worker.objectives.grpo import grpo_loss
from policy_worker.rows.group_reading import decode
from tests.fixtures.policy_models import make_config, make_group

TRL: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "policy_losses_of_trl_1_16.json").read_text()
)
LENGTH = np.array(TRL["lengths"])
KEEP = torch.arange(7)[None] < torch.tensor(LENGTH)[:, None]


def flat(name: str) -> Tensor:
    return torch.tensor(TRL[name])[KEEP]


def columns_of(config: Any, *, reference: bool = False, behaviour: str = "old") -> Any:
    trained = flat("mask").numpy()
    owner = torch.repeat_interleave(torch.arange(len(LENGTH)), torch.tensor(LENGTH))
    weight = token_weights(trained, LENGTH, int(trained.sum()), len(LENGTH), config)
    return TokenColumns(
        behaviour=flat(behaviour),
        advantage=torch.tensor(TRL["advantages"])[owner],
        weight=torch.from_numpy(weight),
        trained=torch.from_numpy(trained),
        staleness=torch.zeros(len(trained)),
        sequence_of=owner,
        sequences=len(LENGTH),
        reference=flat("reference") if reference else None,
    )


def ours(train: dict[str, Any], **columns: Any) -> tuple[Tensor, Tensor]:
    """Loss, and its gradient by log-prob."""
    config = make_config(train=train, rollout={"max_tokens": 7})
    logprobs = flat("logprobs").requires_grad_()
    entropy = flat("entropy") if config.train.loss.entropy_coef else None
    loss = grpo_loss(logprobs, columns_of(config, **columns), config.train.loss, entropy=entropy)
    loss.total.backward()
    return loss.total.detach(), logprobs.grad


@pytest.mark.parametrize(
    ("case", "train"),
    [
        ("grpo", {"algorithm": "grpo", "aggregation": "sequence_mean"}),
        ("dr_grpo", {"algorithm": "dr_grpo"}),
        ("dapo", {"algorithm": "dapo"}),
        ("gspo", {"algorithm": "gspo"}),
        ("gspo wide", {"algorithm": "gspo", "clip_low": 0.2, "clip_high": 0.2}),
        ("cispo", {"algorithm": "cispo"}),
        ("cispo capped at 1.2", {"algorithm": "cispo", "clip_high": 0.2}),
        ("entropy", {"aggregation": "token_mean", "entropy_coef": 0.1}),
    ],
)
def test_each_loss_is_that_of_trl(case: str, train: dict[str, Any]) -> None:
    total, gradient = ours({"dual_clip": "none", **train})
    expected = TRL["cases"][case]
    assert total.item() == pytest.approx(expected["loss"], abs=1e-5)
    wanted = torch.tensor(expected["gradient"])[KEEP]
    torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-5)


def test_rloo_is_that_of_trl_and_off_policy_weighs_each_token_with_its_truncated_ratio() -> None:
    _, gradient = ours({"algorithm": "rloo"}, behaviour="logprobs")
    wanted = torch.tensor(TRL["cases"]["rloo on policy"]["gradient"])[KEEP]
    torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-5)
    _, gradient = ours({"algorithm": "rloo"})
    ratio = (flat("logprobs") - flat("old")).exp().clamp(max=2.0)
    owner = np.repeat(np.arange(len(LENGTH)), LENGTH)
    expected = -ratio * torch.tensor(TRL["advantages"])[owner] * flat("mask") / len(LENGTH)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


def test_a_kl_in_the_reward_lowers_each_tokens_advantage_by_what_follows_it() -> None:
    """Against a loop: r_t = -beta log(pi / ref) at each token, and the advantage is their sum from
    t on."""
    train = {"algorithm": "reinforce++", "kl_coef": 0.3, "dual_clip": "none"}
    total, gradient = ours(train, reference=True)
    logprobs, old, ref, mask = (flat(n) for n in ("logprobs", "old", "reference", "mask"))
    value, expected, tokens = 0.0, torch.zeros_like(logprobs), float(mask.sum())
    start = 0
    for sequence, length in enumerate(LENGTH):
        for t in range(start, start + length):
            later = range(t, start + length)
            cost = sum(float((logprobs[s] - ref[s]) * mask[s]) for s in later)
            advantage = TRL["advantages"][sequence] - 0.3 * cost
            ratio = math.exp(float(logprobs[t] - old[t]))
            clipped = min(max(ratio, 0.8), 1.2)
            value -= min(ratio * advantage, clipped * advantage) * float(mask[t]) / tokens
            if ratio * advantage <= clipped * advantage:
                expected[t] = -ratio * advantage * mask[t] / tokens
        start += length
    assert total.item() == pytest.approx(value, abs=1e-5)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)


REWARD = np.array([1.0, 0.0, 0.5, 1.0, 1.0, 0.2])
SIZES = np.array([3, 2, 1])


def totals() -> StepTotals:
    means = np.repeat([0.5, 1.0, 0.2], SIZES)
    within = float(((REWARD - means) ** 2).sum())
    sums = float(REWARD.sum()), float(((REWARD - REWARD.mean()) ** 2).sum())
    return StepTotals(
        1, 0, 10, 6, samples=6, reward_sum=sums[0], reward_squares=sums[1], within_squares=within
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [1 - 0.25, -0.75, 0.0, 0.0, 0.0, 0.0]),
        ("dr_grpo", [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]),
        ("reinforce++", (REWARD - REWARD.mean()) / (REWARD.std(ddof=1) + EPSILON)),
        (
            "reinforce++-baseline",
            np.array([0.5, -0.5, 0, 0, 0, 0]) / (math.sqrt(0.5 / 5) + EPSILON),
        ),
    ],
)
def test_advantages_by_name(name: str, expected: Any) -> None:
    """Groups of three, two with a tie, and one alone."""
    found = advantages_of(REWARD, SIZES, totals(), TrainConfig(algorithm=name).loss)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def covariance_batch() -> Any:
    logprobs = [[-0.1, -3.0, -1.0], [-2.5, -0.2]]
    group = make_group("t0", [1], [[2, 3, 4], [5, 6]], [1.0, 0.0], logprobs=logprobs)
    return decode([group]), np.array([2.0, 2.0, 2.0, -3.0, -3.0], np.float32)


def test_tokens_of_the_largest_covariance_in_its_range_are_chosen_and_no_untrained_ones() -> None:
    batch, advantage = covariance_batch()
    centred = (batch.behaviour - batch.behaviour.mean()) * (advantage - advantage.mean())
    trained = np.ones(5, np.float32)
    loss = LossConfig(covariance="kl", covariance_share=0.4)
    chosen = chosen_tokens(batch, advantage, trained, loss)
    assert chosen.sum() == 2 and set(np.flatnonzero(chosen)) == set(np.argsort(-centred)[:2])
    assert not chosen_tokens(batch, np.zeros(5, np.float32), trained, loss).any(), "equal rewards"
    loss = LossConfig(covariance="clip", covariance_share=1.0, covariance_range=(0.5, 100.0))
    everything = chosen_tokens(batch, advantage, trained, loss)
    assert (everything == (centred >= 0.5)).all() and 0 < everything.sum() < 5
    first = int(np.flatnonzero(everything)[0])
    trained[first] = 0
    assert chosen_tokens(batch, advantage, trained, loss)[first] == 0


@pytest.mark.parametrize(
    ("logprobs", "share"),
    [([[-1, -1, -1], [-2, -2, -2]], 1 / 6), ([[-0.1, -3.0, -1.0], [-2.5, -0.2, -1.0]], 0.1)],
)
def test_a_small_share_is_right_over_many_groups_and_prefers_no_equal_place(
    logprobs: list[list[float]], share: float
) -> None:
    groups = [
        make_group(f"t{n}", [1], [[n, 2, 3], [4, 5, n]], [1.0, 0.0], logprobs=logprobs)
        for n in range(400)
    ]
    advantage = np.tile(np.array([1, 1, 1, -1, -1, -1], np.float32), 400)
    loss = LossConfig(covariance="kl", covariance_share=share)
    chosen = chosen_tokens(decode(groups), advantage, np.ones(2400, np.float32), loss)
    assert chosen.mean() == pytest.approx(share, abs=0.02)
    if share == 1 / 6:
        by_place = chosen.reshape(400, 6).mean(0)
        assert by_place.max() < 0.3, by_place


def chosen_gradient(covariance: str) -> tuple[Tensor, Tensor]:
    config = make_config(train={"covariance": covariance, "covariance_kl_coef": 0.5})
    plain = columns_of(config)
    chosen = torch.zeros(len(plain.weight))
    chosen[3] = 1.0
    gradients = []
    for extra in ({}, {"chosen": chosen}):
        logprobs = flat("logprobs").requires_grad_()
        fields = {n: getattr(plain, n) for n in plain.__dataclass_fields__ if n != "chosen"}
        grpo_loss(logprobs, TokenColumns(**fields, **extra), config.train.loss).total.backward()
        gradients.append(logprobs.grad)
    return gradients[0], gradients[1]


def test_clip_cov_takes_the_gradient_of_a_chosen_token_and_no_other() -> None:
    without, with_it = chosen_gradient("clip")
    assert with_it[3] == 0 and without[3] != 0
    without[3] = 0
    torch.testing.assert_close(with_it, without)


def test_kl_cov_adds_a_kl_to_the_policy_that_sampled_at_a_chosen_token_and_no_other() -> None:
    without, with_it = chosen_gradient("kl")
    change = with_it - without
    x = flat("old")[3] - flat("logprobs")[3]
    weight = columns_of(make_config()).weight[3]
    assert change[3].item() == pytest.approx((0.5 * ((-x).exp() - 1) * weight).item(), abs=1e-6)
    change[3] = 0
    assert (change == 0).all()


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_a_users_setting_goes_before_what_a_name_suggests(name: str) -> None:
    train = TrainConfig(algorithm=name)
    for key, value in FAMILY[name].settings.items():
        assert attrgetter(key)(train) == value
    assert TrainConfig(**train.model_dump()) == train, "written out in full"
    if "loss.clip_high" in FAMILY[name].suggests:
        settings = TrainConfig.model_validate({"algorithm": name, "loss": {"clip_high": 0.123}})
        assert settings.loss.clip_high == 0.123


@pytest.mark.parametrize("name", sorted(n for n in FAMILY if FAMILY[n].defines))
def test_a_setting_that_contradicts_a_name_is_refused_with_the_way_out(name: str) -> None:
    key, value = next(iter(FAMILY[name].defines.items()))
    setting = key.removeprefix("loss.")
    other = {"aggregation": "sequence_mean", "advantage": "group", "surrogate": "clip"}.get(
        setting, not value if isinstance(value, bool) else "token"
    )
    with pytest.raises(ValidationError, match=rf"{key} .*train\.algorithm = grpo"):
        TrainConfig.model_validate({"algorithm": name, "loss": {setting: other}})
