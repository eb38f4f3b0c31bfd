"""What a row costs the host, and the kernels that save it work: no wait, no conversion of weights,
few graphs, and the numbers of a plain softmax."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx

from policy_worker.model import heads
from policy_worker.model.heads import score
from policy_worker.model.policy_model import compile_model, load_model
from policy_worker.model.precision import BfloatCopies
from policy_worker.rows.group_reading import decode
from policy_worker.rows.packing import pack
from policy_worker.step.gradients import Gradients
from testbed.dispatches import Counted
from tests.fixtures.policy_models import make_config, random_groups, tiny_network
from tests.fixtures.train_states import tiny_config
from tests.fixtures.training_steps import keys, make_gradients, step_totals

CPU = torch.device("cpu")


def compile_with(monkeypatch, backend):
    """Has torch compile with ``backend``, and forget what other tests have compiled."""
    make = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **given: make(f, **{**given, "backend": backend})
    )
    monkeypatch.setattr(heads, "_compiled", cache(heads._compiled.__wrapped__))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_waits_for_nothing_and_converts_no_weight(dtype, monkeypatch):
    config = make_config(
        model_section={"dtype": dtype}, train={"tokens_per_microbatch": 40, "entropy_coef": 0.01}
    )
    groups = random_groups(6, group_size=3, seed=4)
    gradients = make_gradients(config)
    weights = sum(p.numel() for p in gradients.parameters)
    gradients.begin(step_totals(groups), keys(groups))
    rows = []
    gradients.on_progress = lambda: rows.append(counted.taken())
    looks = []
    for name in ("tolist", "item", "cpu", "numpy"):  # not dispatched on a CPU
        look = getattr(torch.Tensor, name)
        told = lambda *given, look=look, name=name: looks.append(name) or look(*given)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, told)
    with Counted() as counted:
        gradients.add(groups)
    assert len(rows) > 2 and not looks
    assert gradients.stats.mean("ratio") and looks == ["tolist"]  # one transfer for all rows
    assert not sum(row["waits"] for row in rows)
    # The first row of a step copies the weights; each hands its gradients over in float32.
    assert rows[0]["copied"] == (weights if dtype == "bfloat16" else 0)
    assert not sum(row["copied"] for row in rows[1:])
    assert not sum(row["of weights"] for row in rows)


def test_a_layer_dispatches_few_operators_and_converts_activations_alone():
    section = {"dtype": "bfloat16", "gradient_checkpointing": False}
    config = make_config(model_section=section, train={"tokens_per_microbatch": 512})
    groups = random_groups(2, group_size=8, seed=2)
    found = []
    for layers in (2, 4):
        gradients = make_gradients(config, tiny_network("qwen3", layers=layers))
        gradients.begin(step_totals(groups), keys(groups))
        gradients.add(groups[:1])
        with Counted() as counted:
            gradients.add(groups[1:])
        found.append(counted.taken())
    few, many = found
    assert (many["dispatches"] - few["dispatches"]) / 2 <= 194
    assert 2 * few["dispatches"] - many["dispatches"] <= 143
    assert (many["conversions"] - few["conversions"]) / 2 <= 16


def test_bfloat16_copies_follow_the_weights_and_compute_as_a_model_in_bfloat16():
    config = make_config(model_section={"dtype": "bfloat16"})
    groups = random_groups(3, group_size=3, seed=2)
    batch = decode(groups)
    micro = pack(batch, np.arange(len(batch.length)), CPU)
    gradients = make_gradients(config)
    for scale in (1.0, 1.01):  # an update between two steps
        with torch.no_grad():
            for parameter in gradients.parameters:
                parameter.mul_(scale)
        gradients.clear()
        found = gradients.forwards.scores(micro)[0].logprobs
        alone = tiny_network("qwen3")
        for parameter in alone.parameters():
            parameter.data.mul_(scale)
        BfloatCopies([alone]).refresh()
        with torch.autocast("cpu", torch.bfloat16):
            wanted = score(alone, micro, config.rollout.temperature).logprobs
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_mb", [128, 1e-3])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_head_is_a_plain_softmax_in_values_and_gradients(family, chunk_mb, temperature):
    model = tiny_network(family).double()
    batch = decode(random_groups(5, group_size=3, seed=5))
    micro = pack(batch, np.arange(len(batch.length)), CPU)
    hidden = []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, given: hidden.append(given[0])
    )
    settings = {"entropy_gradient": True, "chunk_mb": chunk_mb}
    found = score(model, micro, temperature, **settings)
    weights = torch.linspace(-1, 1, len(micro.targets), dtype=torch.float64)
    (found.logprobs * weights + found.entropy * weights.flip(0)).sum().backward()
    got = [found.logprobs.detach(), found.entropy.detach(), *(p.grad for p in model.parameters())]

    model.zero_grad(set_to_none=True)
    output = model.model(
        input_ids=micro.input_ids, position_ids=micro.position_ids, packing=micro.packing
    )
    chosen = output.last_hidden_state[0].index_select(0, micro.predict_from)
    logits = model.get_output_embeddings()(chosen)
    if family == "gemma2":
        logits = (logits / 5.0).tanh() * 5.0
    distribution = (logits / temperature).log_softmax(-1)
    logprobs = distribution.gather(1, micro.targets[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    (logprobs * weights + entropy * weights.flip(0)).sum().backward()
    wanted = [logprobs.detach(), entropy.detach(), *(p.grad for p in model.parameters())]
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


def test_two_hundred_rows_compile_a_handful_of_graphs(tmp_path, monkeypatch):
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compile_with(monkeypatch, backend)
    config = tiny_config(tmp_path).model
    model = load_model(config.path, config, CPU)
    compile_model(model)
    rng = np.random.default_rng(1)
    for seed in range(200):
        groups = random_groups(int(rng.integers(1, 5)), group_size=3, seed=seed, vocab=15)
        batch = decode(groups)
        micro = pack(batch, np.arange(len(batch.length)), CPU)
        score(model, micro, 0.7).logprobs.sum().backward()
    assert 2 <= len(graphs) <= 6


def test_a_failure_to_compile_goes_on_without(tmp_path, monkeypatch, caplog):
    def broken(*_given):
        raise RuntimeError("no compiler")

    compile_with(monkeypatch, heads.inductor)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    groups = random_groups(6, group_size=3, seed=4)
    found = []
    for compiled in (False, True):
        gradients = make_gradients(make_config())
        if compiled:
            compile_model(gradients.state.model)
        gradients.begin(step_totals(groups), keys(groups))
        gradients.add(groups)
        found.append([p.grad for p in gradients.parameters])
    torch.testing.assert_close(*found, atol=0, rtol=0)
    assert "no compiler" in caplog.text


def test_a_backward_that_cannot_be_compiled_runs_as_it_is(monkeypatch, caplog):
    def half_broken(graph, _inputs, is_backward=False, **_settings):
        if is_backward:
            graph.graph.erase_node(next(iter(reversed(graph.graph.nodes))))
            raise RuntimeError("no Triton")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    broken = partial(compile_fx.compile_fx, inner_compile=half_broken)
    monkeypatch.setattr(compile_fx, "compile_fx", broken)
    given = torch.linspace(-1, 1, 7, requires_grad=True)
    torch.compile(lambda x: x.sin() * x, backend=heads.inductor)(given).sum().backward()
    torch.testing.assert_close(given.grad, (given.cos() * given + given.sin()).detach())
    assert "no Triton" in caplog.text


def test_what_an_architecture_keeps_in_float32_has_no_copy():
    model = torch.nn.ModuleDict({"gate": torch.nn.Linear(2, 2), "up": torch.nn.Linear(2, 2)})
    model._keep_in_fp32_modules_strict = {"gate"}
    BfloatCopies([model])
    assert [model[name].weight.dtype for name in ("gate", "up")] == [torch.float32, torch.bfloat16]


def test_a_state_takes_one_set_of_copies():
    gradients = make_gradients(make_config(model_section={"dtype": "bfloat16"}))
    with pytest.raises(ValueError, match="has it copies already"):
        Gradients(gradients.state, CPU)
    gradients.forwards.copies.take_out()
    Gradients(gradients.state, CPU)
