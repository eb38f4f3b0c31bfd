"""Decay groups, stats and the staleness of tokens."""

import numpy as np
import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from controller.ledger.specs import LearningRate
from policy_worker.model.policy_model import ModelError, load_model
from policy_worker.objectives.columns import staleness
from policy_worker.ranks.sharding import load_sharded_state
from policy_worker.rows.replica import Replica
from policy_worker.step.optimizer import build_optimizer
from testbed.tiny_model import make_tiny_model
from tests.fixtures.policy_models import make_config, tiny_network

CPU = torch.device("cpu")


def test_a_linear_schedule_is_that_of_transformers():
    ours = LearningRate(1.0, "linear", warmup_steps=2)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = get_linear_schedule_with_warmup(optimizer, 2, 10)
    for step in range(1, 11):
        if step > 2:  # theirs wastes the first step of the warm-up
            assert ours.at(step, 10) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_norms_are_not_decayed_and_state_exists_from_the_start():
    model = tiny_network("qwen3")
    optimizer = build_optimizer({"policy": model}, make_config(train={"weight_decay": 0.5}).train)
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == ("norm" not in name), name
        assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}


def test_first_update_equals_adamw_made_without_prior_state():
    a, b = tiny_network("qwen3"), tiny_network("qwen3")
    ours = build_optimizer({"policy": a}, make_config(train={"lr": 1e-3}).train)
    plain = torch.optim.AdamW(b.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(2):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            p.grad = torch.sin(p.detach() * 50)
            q.grad = p.grad.clone()
        ours.step()
        plain.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-7, rtol=1e-6)


def test_staleness_counts_steps_across_a_rollback():
    # Versions 0 to 7 stand after steps 0 to 7. Rolled back to step 4: version 8 stands after it.
    lines = [(8, 4), (0, 0)]
    version = np.array([8, 7, 4, 3, 9, 0])
    assert staleness(version, 6, lines).tolist() == [1, 0, 1, 2, 0, 5]


def test_an_unreadable_model_is_one_line_that_names_the_field(tmp_path):
    config = make_config().model
    (tmp_path / "empty").mkdir()
    for path in (str(tmp_path / "missing"), str(tmp_path / "empty")):
        with pytest.raises(ModelError) as error:
            load_model(path, config, CPU, field="train.loss.reference_path")
        message = str(error.value)
        assert "\n" not in message
        assert path in message and message.startswith("train.loss.reference_path")


def test_a_loaded_model_trains_in_float32_without_dropout(tmp_path):
    config = make_config(model=make_tiny_model(tmp_path / "m"))
    state = load_sharded_state(config, Replica(), CPU)
    assert state.version == -1
    names = [name for name, _ in state.named_weights()]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names  # tied: once
    assert all(t.dtype == torch.float32 for _, t in state.named_weights())
