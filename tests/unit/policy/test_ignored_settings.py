"""The list of the settings that an objective does not read is true."""

from typing import Any

import pytest
import torch

from paceline.config.objectives import BUILT_IN
from paceline.v1 import rollout_pb2
from policy_worker.conformance import toy_config
from policy_worker.toy_step import ToyStep

OTHER: dict[str, dict[str, Any]] = {
    "aggregation": {"aggregation": "dr_grpo"},
    "advantage": {"advantage": "leave_one_out"},
    "advantage_norm": {"advantage_norm": False},
    "skip_zero_advantage": {"skip_zero_advantage": False},
    "surrogate": {"surrogate": "weight"},
    "importance_level": {"importance_level": "sequence"},
    "clip_low": {"clip_low": 0.01},
    "clip_high": {"clip_high": 0.01},
    "dual_clip": {"dual_clip": 1.01},
    "proximal": {"proximal": "interpolated"},
    "tis_cap": {"proximal": "trainer", "tis_cap": 0.5},
    "mask_ratio_token": {"mask_ratio_token": (0.9, 1.1)},
    "mask_ratio_sequence": {"mask_ratio_sequence": (0.99, 1.01)},
    "kl_coef": {"kl_coef": 0.2},
    "kl_estimator": {"kl_coef": 0.1, "kl_estimator": "k2"},
    "kl_in": {"kl_coef": 0.1, "kl_in": "reward"},
    "entropy_coef": {"entropy_coef": 0.1},
    "overlong_filter": {"overlong_filter": True},
}
UNSEEN = {("grpo", "skip_zero_advantage"), ("distill", "clip_high")}
"""It leaves out what adds nothing; and the toy's teacher finds every token less likely than the
policy does."""


def gradient(algorithm: str, train: dict[str, Any]) -> torch.Tensor:
    """Of the toy's step, without the checks of the settings."""
    config = toy_config(algorithm, {}, {})
    loss = config.train.loss.model_copy(update=train)
    changed = config.train.model_copy(update={"loss": loss})
    toy = ToyStep(config.model_copy(update={"train": changed}))
    for group in toy.groups[::2]:
        group.completions[0].finish_reason = rollout_pb2.FINISH_REASON_LENGTH
    return toy.gradient(toy.groups)


@pytest.mark.parametrize(
    "algorithm", ["grpo", *(name for name, entry in BUILT_IN.items() if entry.ignores)]
)
def test_what_is_listed_changes_no_gradient_and_the_rest_does(algorithm: str) -> None:
    listed = BUILT_IN[algorithm].ignores
    default = gradient(algorithm, {})
    for name, train in OTHER.items():
        base = {key: value for key, value in train.items() if key != name}
        before = gradient(algorithm, base) if base else default
        same = torch.equal(before, gradient(algorithm, train))
        unchanged = name in listed or (algorithm, name) in UNSEEN
        assert same == unchanged, f"{algorithm}: train.{name}"
    assert listed <= {*OTHER, "reference", "branches"}  # the toy's samples have none
