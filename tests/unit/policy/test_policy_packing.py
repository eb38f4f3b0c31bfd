"""Packed rows must score every token as if its sequence were alone."""

import numpy as np
import pytest
import torch

from paceline.model_head import MIB
from policy_worker.model import attention, row_layout
from policy_worker.model.heads import make_scorer, score
from policy_worker.model.policy_model import _prepared
from policy_worker.rows.group_reading import decode
from policy_worker.rows.packing import attended_tokens, pack, plan_rows
from testbed.architectures import ARCHITECTURES, tiny_architecture
from tests.fixtures.policy_models import make_config, make_group, random_groups, tiny_network

CPU = torch.device("cpu")


def alone(model, prompt, completion, temperature):
    """Log-probs and entropies of one unpacked sequence, through the model's ordinary forward."""
    ids = torch.tensor([*prompt, *completion])[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    distribution = torch.log_softmax(logits / temperature, -1)
    chosen = distribution.gather(1, torch.tensor(completion)[:, None])[:, 0]
    return chosen, -(distribution.exp() * distribution).sum(-1)


def sequences_of(groups):
    for group in groups:
        prompt = np.frombuffer(group.prompt_tokens, "<i4").tolist()
        for completion in group.completions:
            yield prompt, np.frombuffer(completion.tokens, "<i4").tolist()


@pytest.mark.parametrize("limit", [40, 1000])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "qwen3_moe"])
def test_packed_rows_equal_each_sequence_alone(family, limit):
    equal_alone(tiny_network(family), limit)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_packed_rows_of_what_teams_train_equal_each_sequence_alone(family):
    """Against the model's own forward, before its recurrent layers are given sequences."""
    attention.register()
    model = tiny_architecture(family, attention=attention.BLOCKS)
    make_scorer(model)
    _prepared(model, make_config().model, CPU, trainable=True)
    equal_alone(model, 40)


@pytest.mark.parametrize("dense", [True, False])
def test_sinks_in_flex_attention_equal_the_model_s_own(dense):
    attention.register()
    model = tiny_architecture("gpt_oss", attention=attention.FLEX)
    own = tiny_architecture("gpt_oss", attention="eager")
    make_scorer(model)
    groups = random_groups(3, group_size=2, seed=3, shortest=12, longest=20)
    micro = pack(decode(groups), np.arange(6), CPU)
    with torch.set_grad_enabled(dense):  # without gradients a CPU has flex attention, too
        got = score(model, micro, 1.0).logprobs.detach()
        expected = torch.cat([alone(own, p, c, 1.0)[0] for p, c in sequences_of(groups)])
    torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=1e-5)


def equal_alone(model, limit):
    groups = random_groups(5, group_size=3, seed=3)
    batch = decode(groups)
    expected = [alone(model, p, c, 0.7) for p, c in sequences_of(groups)]
    logp = torch.cat([e[0] for e in expected])
    weights = torch.linspace(-1, 1, len(logp))
    (logp * weights).sum().backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    got, entropy = torch.full_like(logp, float("nan")), torch.full_like(logp, float("nan"))
    rows = plan_rows(batch, np.arange(len(batch.length)), limit)
    assert (len(rows) > 1) == (limit == 40)
    for row in rows:
        micro = pack(batch, row, CPU)
        scores = score(model, micro, 0.7)
        (scores.logprobs * weights[micro.token_index]).sum().backward()
        got[micro.token_index] = scores.logprobs.detach()
        entropy[micro.token_index] = scores.entropy
    torch.testing.assert_close(got, logp.detach(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(entropy, torch.cat([e[1] for e in expected]), atol=2e-6, rtol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], atol=2e-5, rtol=1e-4)


def test_sequences_of_very_different_lengths_get_their_own_attention_blocks(monkeypatch):
    monkeypatch.setitem(row_layout.BLOCK_SCORES, "cpu", 64)
    model = tiny_network("qwen3")
    groups = random_groups(2, group_size=2, seed=1, longest=4) + random_groups(
        2, group_size=2, seed=2, shortest=30, longest=40
    )
    batch = decode(groups)
    micro = pack(batch, np.arange(8), CPU)
    assert len(micro.packing.blocks[0]) > 1
    got = score(model, micro, 1.0).logprobs
    expected = torch.cat([alone(model, p, c, 1.0)[0] for p, c in sequences_of(groups)])
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_scores", [0, 200, 4096, 1 << 20])
def test_attention_blocks_have_the_fewest_scores_of_all_splits_by_length(block_scores):
    full = np.random.default_rng(0).choice([3, 4, 9, 20, 21, 64], 40)
    lengths = np.unique(full)

    def cost(blocks):
        return sum(len(block) * full[block].max() ** 2 + block_scores for block in blocks)

    splits = [
        np.split(lengths, [i + 1 for i in range(len(lengths) - 1) if cuts >> i & 1])
        for cuts in range(1 << (len(lengths) - 1))
    ]
    fewest = min(cost([np.flatnonzero(np.isin(full, s)) for s in split]) for split in splits)
    blocks = row_layout.similar(full, block_scores)
    assert cost(blocks) == fewest
    assert sorted(np.concatenate(blocks)) == list(range(len(full)))


@pytest.mark.parametrize("tokens", [7, 1 << 20])
def test_the_entropy_has_a_gradient_only_if_it_is_wanted(tokens):
    """In chunks and at once, against a plain softmax of each sequence alone."""
    model = tiny_network("qwen3")
    groups = random_groups(3, group_size=2, seed=5)
    micro = pack(decode(groups), np.arange(6), CPU)
    chunk = tokens * model.config.vocab_size * 4 / MIB
    assert not score(model, micro, 0.7, chunk_mb=chunk).entropy.requires_grad
    found = score(model, micro, 0.7, entropy_gradient=True, chunk_mb=chunk).entropy
    found.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    wanted = [alone(model, p, c, 0.7)[1] for p, c in sequences_of(groups)]
    torch.testing.assert_close(found, torch.cat(wanted), atol=2e-6, rtol=1e-5)
    torch.cat(wanted).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-5, rtol=1e-4)


def test_rows_hold_every_sequence_once_within_the_limit():
    batch = decode(random_groups(9, group_size=4, seed=7))
    keep = np.array([0, 1, 2, 5, 9, 10, 11, 12, 20, 35])
    for limit in (1, 16, 30, 64, 10_000):
        rows = plan_rows(batch, keep, limit)
        assert sorted(np.concatenate(rows).tolist()) == keep.tolist()
        for row in rows:
            size = pack(batch, row, CPU).input_ids.shape[1]
            assert size <= attended_tokens(batch, row).sum()
            assert attended_tokens(batch, row).sum() <= limit or len(row) == 1
    assert plan_rows(batch, keep[:0], 64) == []


def saved_bytes(model, batch, row):
    """Bytes that the backward pass of a row needs, each storage once."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        score(model, pack(batch, row, CPU), 1.0).logprobs.sum().backward()
    model.zero_grad()
    return sum(size for at, size in storages.items() if at not in owned)


@pytest.mark.parametrize("completion", [5, 40])
def test_a_long_prompt_with_many_completions_needs_no_more_memory_than_the_limit(completion):
    """A row of one plain sequence of ``limit`` tokens is the measure."""
    limit = 120
    model = tiny_network("qwen3")
    plain = decode([make_group("t0", [1] * 2, [[2] * (limit - 1)], [1.0])])
    measure = saved_bytes(model, plain, np.array([0]))
    groups = [
        make_group(f"t{n}", [1] * 70, [[2] * completion for _ in range(16)], [1.0] * 16)
        for n in range(2)
    ]
    batch = decode(groups)
    rows = plan_rows(batch, np.arange(32), limit)
    assert sorted(np.concatenate(rows).tolist()) == list(range(32))
    worst = max(saved_bytes(model, batch, row) for row in rows)
    assert worst <= 1.1 * measure


def test_a_group_shares_the_forward_of_its_prompt():
    batch = decode(random_groups(1, group_size=8, seed=0))
    row = pack(batch, np.arange(8), CPU).input_ids
    assert row.shape[1] == batch.prompt_length[0] + batch.length.sum() - 8
