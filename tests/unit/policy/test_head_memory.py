"""Chunks of the vocabulary must bound memory as computed, and change neither log-probs nor
gradients."""

from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.memory_plan import head_scratch_bytes
from paceline.model_head import MIB, tokens_per_chunk
from policy_worker.model import attention
from policy_worker.model.heads import make_scorer, score
from policy_worker.rows.group_reading import decode
from policy_worker.rows.packing import pack
from tests.fixtures.live_memory import LiveMemory
from tests.fixtures.policy_models import make_group

VOCABULARY, HIDDEN, TOKENS = 150_000, 8, 32


@cache
def network(family: str):
    """One layer and a large vocabulary, whose head is the embedding."""
    attention.register()
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        **({"attn_logit_softcapping": None} if family == "gemma2" else {}),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.BLOCKS)
    make_scorer(model)
    return model


def micro_batch():
    group = make_group("t0", [1, 2], [list(range(5, 5 + TOKENS))], [1.0])
    return pack(decode([group]), np.array([0]), torch.device("cpu"))


def chunk_of(tokens: int) -> float:
    """MiB of logits of so many tokens."""
    return tokens * VOCABULARY * 4 / MIB


def results(model, chunk_mb: float, entropy_gradient: bool):
    """Log-probs, entropies, the gradient of each parameter, and the peak of live memory."""
    model.zero_grad()
    micro = micro_batch()
    with LiveMemory(*model.parameters()) as memory:
        scores = score(model, micro, 0.7, entropy_gradient=entropy_gradient, chunk_mb=chunk_mb)
        loss = scores.logprobs.sum() / TOKENS
        if entropy_gradient:
            loss = loss + scores.entropy.sum() / TOKENS
        loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    return scores.logprobs.detach(), scores.entropy.detach(), gradients, memory.peak


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])  # gemma2 caps its logits
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunks_of_a_large_vocabulary_change_no_number(family, entropy_gradient):
    model = network(family)
    logprobs, entropy, gradients, whole = results(model, chunk_of(TOKENS), entropy_gradient)
    in_chunks = results(model, chunk_of(5), entropy_gradient)
    torch.testing.assert_close(in_chunks[0], logprobs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(in_chunks[1], entropy, atol=1e-6, rtol=1e-6)
    for found, wanted in zip(in_chunks[2], gradients, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert in_chunks[3] < whole / 2


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("tokens", [TOKENS, 8, 2])
def test_memory_of_the_head_is_that_of_the_arithmetic(tokens, entropy_gradient):
    peak = results(network("qwen3"), chunk_of(tokens), entropy_gradient)[3]
    scratch = head_scratch_bytes(
        TOKENS, HIDDEN, VOCABULARY, chunk_of(tokens), entropy_gradient=entropy_gradient
    )
    bound = scratch + 4 * VOCABULARY * HIDDEN  # and the gradient of the head
    assert 0.6 * bound <= peak <= 1.01 * bound


def test_a_chunk_has_at_least_one_token_and_fits_the_setting():
    assert tokens_per_chunk(151_936, 128) == 220
    assert tokens_per_chunk(1 << 30, 1) == 1
