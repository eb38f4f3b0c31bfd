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
from paceline.config.sections.training import TrainConfig
from policy_worker.objectives.advantages import EPSILON, advantages_of
from policy_worker.objectives.batch import StepTotals
from policy_worker.objectives.columns import TokenColumns, token_weights
from policy_worker.objectives.grpo import grpo_loss
from tests.fixtures.policy_models import make_config

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
