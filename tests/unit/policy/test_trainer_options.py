"""Options of the trainer that change memory and speed, and no number: attention, compilation,
offloaded activations."""

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from policy_worker.model import attention
from policy_worker.model.heads import score
from policy_worker.model.host_activations import HostActivations
from policy_worker.model.policy_model import load_model
from policy_worker.rows.group_reading import decode
from policy_worker.rows.packing import pack
from tests.fixtures.policy_models import random_groups, tiny_network
from tests.fixtures.train_states import tiny_config

CPU = torch.device("cpu")


def measured(model, micro):
    """Log-probs [C] of the row, and the gradient of their weighted sum by parameter."""
    model.zero_grad()
    logprobs = score(model, micro, 0.7).logprobs
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def row(seed=5, groups=4):
    batch = decode(random_groups(groups, group_size=3, seed=seed))
    return pack(batch, np.arange(len(batch.length)), CPU)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "qwen3_moe"])
def test_flex_attention_scores_as_attention_by_blocks(family):
    model, micro = tiny_network(family), row()
    wanted = measured(model, micro)
    attention.register()
    model.set_attn_implementation(attention.FLEX)
    torch.testing.assert_close(measured(model, micro), wanted, atol=2e-5, rtol=1e-4)
    with torch.no_grad():  # by flex attention itself, which has no backward pass on a CPU
        alone = score(model, micro, 0.7).logprobs
    torch.testing.assert_close(alone, wanted[0], atol=2e-5, rtol=1e-4)


def test_flex_attention_makes_one_mask_for_layers_of_one_window():
    model, micro = tiny_network("gemma2"), row()
    attention.register()
    model.set_attn_implementation(attention.FLEX)
    score(model, micro, 1.0)
    assert set(micro.packing.masks) == {(None, True), (8, True)}


@pytest.mark.heavy
def test_compiled_blocks_score_as_others(tmp_path):
    config = tiny_config(tmp_path).model
    found = []
    for given in (False, True):
        model = load_model(config.path, config.model_copy(update={"compile": given}), CPU)
        batch = decode(random_groups(4, group_size=3, seed=5, vocab=15))
        rows = [pack(batch, np.arange(end), CPU) for end in (12, 6, 3)]
        found.append([measured(model, micro) for micro in rows])
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("auto", "paceline_packed"), ("flex", "paceline_flex")],
)
def test_a_model_loaded_later_has_its_attention_and_brings_none_into_compilation(
    tmp_path, name, expected
):
    config = tiny_config(tmp_path).model.model_copy(update={"attention": name})
    compiled = load_model(config.path, config.model_copy(update={"compile": True}), CPU)
    registered = compiled.config._attn_implementation
    attention = ALL_ATTENTION_FUNCTIONS[registered]
    later = load_model(config.path, config, CPU)
    assert later.config._attn_implementation == expected
    assert ALL_ATTENTION_FUNCTIONS[registered] is attention


@pytest.mark.parametrize("checkpointing", [False, True])
def test_offloaded_activations_and_gradient_checkpointing_change_no_bit(checkpointing):
    model, micro = tiny_network("qwen3"), row()
    wanted = measured(model, micro)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with HostActivations(CPU).of_row(micro.input_ids.shape[1]):
        found = measured(model, micro)
    assert torch.equal(found[0], wanted[0])
    assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())


def test_the_inputs_of_blocks_leave_the_device_and_no_weight_does(monkeypatch):
    model, micro = tiny_network("qwen3"), row()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens, moved = micro.input_ids.shape[1], []
    empty = torch.empty

    def recorded(*shape, **options):
        made = empty(*shape, **options)
        if "pin_memory" in options and made.is_floating_point():  # a row's places go the other way
            moved.append(tuple(made.shape))
        return made

    monkeypatch.setattr(torch, "empty", recorded)
    with HostActivations(CPU).of_row(tokens):
        score(model, micro, 1.0)
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    assert moved.count((1, tokens, hidden)) >= layers
    assert {shape[:2] for shape in moved} == {(1, tokens)}
