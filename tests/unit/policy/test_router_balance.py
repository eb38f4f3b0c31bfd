"""The load-balancing loss of experts: its values, its gradient, and that it is a sum over
sequences."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from policy_worker.model.policy_model import ModelError
from policy_worker.rows.group_reading import decode
from policy_worker.rows.row_forwards import balance_of_sequences, experts_per_token
from tests.fixtures.policy_models import make_config, random_groups, tiny_network
from tests.fixtures.training_steps import keys, make_gradients, step_totals


def logits(tokens: int, experts: int, layers: int = 1, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, experts, generator=generator, requires_grad=True) for _ in range(layers)
    ]


@pytest.mark.parametrize("chosen", [1, 2, 4])
def test_one_layer_of_one_sequence_is_the_loss_of_the_switch_transformer(chosen: int) -> None:
    (ours,) = logits(11, 8)
    theirs = ours.detach().clone().requires_grad_()
    trained = torch.tensor([1.0] * 7 + [0.0] * 4)
    value = balance_of_sequences([ours], trained, torch.zeros(11, dtype=torch.long), 1, chosen)
    # transformers counts each of the chosen experts as a whole token.
    expected = load_balancing_loss_func((theirs,), 8, chosen, trained[None]) / chosen
    torch.testing.assert_close(value[0], expected, atol=1e-6, rtol=1e-6)
    value.sum().backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-6)


def test_a_sequence_without_a_trained_token_counts_nothing() -> None:
    (layer,) = logits(4, 4)
    owner = torch.tensor([0, 0, 1, 1])
    value = balance_of_sequences([layer], torch.tensor([1.0, 1, 0, 0]), owner, 2, 2)
    assert value[1] == 0 and value[0] > 0


def test_a_dense_model_has_no_experts() -> None:
    assert experts_per_token(tiny_network("qwen3")) == 0
    assert experts_per_token(tiny_network("qwen3_moe")) == 2


def gradients_of(coefficient: float, groups, cut: int | None = None, recompute=False, **train):
    """Gradient of a step by parameter name, its groups added in two calls, and what was
    measured."""
    config = make_config(train={"router_aux_loss_coef": coefficient, **train})
    model = tiny_network("qwen3_moe")
    if recompute:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = make_gradients(config, model)
    gradients.begin(step_totals(groups), keys(groups))
    for some in (groups[:cut], groups[cut:]) if cut else (groups,):
        gradients.add(some)
    named = {name: p.grad for name, p in model.named_parameters()}
    return named, gradients.stats


def alone(groups):
    """Mean balance of the sequences, and its gradient, through the model's ordinary forward of each
    one."""
    model = tiny_network("qwen3_moe", scorer=False)
    batch = decode(groups)
    prompts = batch.prompt_tokens.tolist()
    starts = [0, *batch.prompt_length.cumsum().tolist()]
    ends = batch.length.cumsum().tolist()
    values = []
    for s, (end, length) in enumerate(zip(ends, batch.length.tolist(), strict=True)):
        g = int(batch.group_of[s])
        prompt = prompts[starts[g] : starts[g + 1]]
        ids = torch.tensor([[*prompt, *batch.tokens[end - length : end].tolist()]])
        out = model(input_ids=ids, output_router_logits=True, use_cache=False)
        predicting = slice(len(prompt) - 1, len(prompt) - 1 + length)
        layers = [layer.reshape(-1, 4)[predicting] for layer in out.router_logits]
        each = [load_balancing_loss_func((layer,), 4, 2) / 2 for layer in layers]
        values.append(torch.stack(each).mean())
    mean = torch.stack(values).mean()
    mean.backward()
    return mean.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("how", [{}, {"tokens_per_microbatch": 24}, {"recompute": True}], ids=str)
def test_the_gradient_of_packed_rows_is_that_of_each_sequence_alone(how) -> None:
    groups = random_groups(3, group_size=3, seed=4)
    without, _ = gradients_of(0.0, groups, **how)
    with_it, stats = gradients_of(0.5, groups, cut=1, **how)
    value, expected = alone(groups)
    assert stats.mean("router_balance") == pytest.approx(value, abs=1e-5)
    for name, gradient in expected.items():
        if gradient is not None:
            change = with_it[name] - without[name]
            torch.testing.assert_close(change, 0.5 * gradient, atol=2e-6, rtol=1e-4)


def test_a_dense_model_with_the_coefficient_is_refused() -> None:
    config = make_config(train={"router_aux_loss_coef": 0.1})
    with pytest.raises(ModelError, match=r"router_aux_loss_coef.*Set it to 0"):
        make_gradients(config)
