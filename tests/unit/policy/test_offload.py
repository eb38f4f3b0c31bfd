"""State in host memory: the same numbers, the same checkpoints, and nothing left on the device
after a pass."""

from functools import partial

import pytest
import torch
from transformers import masking_utils

from paceline.model_shape import blocks_of
from policy_worker.checkpoint.checkpoint import Checkpointer
from policy_worker.model.heads import score
from policy_worker.model.host_memory import keep_on_host
from policy_worker.objectives.objective import Part
from policy_worker.ranks.sharding import load_sharded
from policy_worker.rows.group_reading import decode
from policy_worker.rows.packing import pack
from policy_worker.rows.replica import Replica
from policy_worker.step import optimizer as moments
from policy_worker.step import optimizer as update
from policy_worker.step.optimizer import build_optimizer
from tests.fixtures.policy_models import random_groups, tiny_network
from tests.fixtures.train_states import (
    all_bits,
    assert_same_bits,
    synthetic_step,
    tiny_config,
    tiny_state,
)

CPU, META = torch.device("cpu"), torch.device("meta")


def trained(config, steps=3):
    torch.manual_seed(1)
    state = tiny_state(config)
    for _ in range(steps):
        synthetic_step(state)
    return state


@pytest.mark.parametrize("bucket", [64, moments.BUCKET])
def test_moments_on_the_host_give_the_same_bits(tmp_path, monkeypatch, bucket):
    """64 elements: parameters of several pieces, and pieces of several parameters in a bucket."""
    kind = moments.HostMomentsAdamW
    monkeypatch.setattr(update, "HostMomentsAdamW", partial(kind, bucket=bucket))
    here = trained(tiny_config(tmp_path))
    there = trained(tiny_config(tmp_path, offload_optimizer=True))
    assert isinstance(there.optimizer, kind)
    assert_same_bits(all_bits(there), all_bits(here))


@pytest.mark.parametrize("first", [False, True])
def test_a_checkpoint_goes_on_with_the_moments_elsewhere(tmp_path, first):
    """The setting may change when a run is continued."""
    configs = [tiny_config(tmp_path, offload_optimizer=given) for given in (first, not first)]
    begun = trained(configs[0])
    saver = Checkpointer(tmp_path, configs[0])
    path = saver.save_async(begun).result().path
    saver.close()
    states = [tiny_state(config) for config in configs]
    for state, config in zip(states, configs, strict=True):
        reader = Checkpointer(tmp_path, config)
        reader.restore(state, path)
        reader.close()
        torch.manual_seed(2)
        synthetic_step(state)
    assert states[0].step == 4
    assert_same_bits(all_bits(states[1]), all_bits(states[0]))


def test_moments_are_on_the_host_and_weights_are_not(tmp_path):
    model = tiny_network("qwen3").to(META)
    config = tiny_config(tmp_path, offload_optimizer=True)
    for state in build_optimizer({"policy": model}, config.train).state.values():
        assert {name: t.device.type for name, t in state.items()} == {
            "step": "meta",
            "exp_avg": "cpu",
            "exp_avg_sq": "cpu",
        }


def test_a_resting_parameter_takes_no_step_on_the_host_either():
    rests, moves = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = moments.HostMomentsAdamW([rests, moves], lr=0.1, weight_decay=0.1, fused=True)
    for parameter in (rests, moves):
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": moments.zeros_on_host(parameter),
            "exp_avg_sq": moments.zeros_on_host(parameter),
        }
    moves.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(rests.detach(), torch.ones(3))
    assert [float(optimizer.state[p]["step"]) for p in (rests, moves)] == [0.0, 1.0]
    assert bool((moves.detach() < 1).all())


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_frozen_blocks_are_on_the_device_one_at_a_time(family, monkeypatch):
    """A device without data stands for one with: what computes there, and what comes back, can be
    asked."""
    # It asks for the value of a tensor, which there has none.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    model = tiny_network(family).requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    blocks = blocks_of(model)
    keep_on_host(model, blocks, META)
    seen = []

    def look(*_):
        seen.append([{p.device.type for p in block.parameters()} for block in blocks])

    for block in blocks:
        block.register_forward_pre_hook(look)
    micro = pack(decode(random_groups(2, group_size=2, seed=3)), torch.arange(4).numpy(), META)
    with torch.no_grad():
        assert score(model, micro, 1.0).logprobs.device.type == "meta"
    assert seen == [[{"meta"}, {"cpu"}], [{"cpu"}, {"meta"}]]
    assert_same_bits(dict(model.named_parameters()), before)


def test_weights_come_back_from_a_forward_that_failed():
    model = tiny_network("qwen3").requires_grad_(False)
    keep_on_host(model, blocks_of(model), META)
    micro = pack(decode(random_groups(1, group_size=2, seed=3)), torch.arange(2).numpy(), CPU)
    with torch.no_grad(), pytest.raises(RuntimeError):
        score(model, micro, 1.0)  # tokens and weights are on two devices
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_an_offloaded_reference_gives_the_same_log_probs(tmp_path):
    micro = pack(
        decode(random_groups(2, group_size=2, seed=3, vocab=15)), torch.arange(4).numpy(), CPU
    )
    found = []
    for given in (False, True):
        config = tiny_config(tmp_path, offload_frozen=given)
        model = load_sharded(Part("reference"), config, Replica(), CPU, trainable=False)
        with torch.no_grad():
            found.append(score(model, micro, 1.0).logprobs)
    assert torch.equal(*found)
