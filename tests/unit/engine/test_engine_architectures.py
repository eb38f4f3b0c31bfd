"""The fast path and the general path agree with the model, on the architectures they claim."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rollout_worker.engine.base import EngineError, Request, SamplingParams
from rollout_worker.engine.parameters import WeightTable, copy_parts
from rollout_worker.engine.transformers import fused_decoder
from rollout_worker.engine.transformers.decoder import largest_gap
from rollout_worker.engine.transformers.engine import TransformersEngine
from rollout_worker.engine.transformers.fused_decoder import FusedDecoder
from rollout_worker.engine.transformers.hf_decoder import HFDecoder
from testbed.architectures import ARCHITECTURES, tiny_architecture
from tests.fixtures.engines import tiny_config

NO_TOKENIZER: Any = SimpleNamespace(decode_all=str, end_tokens=())
SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LEAN = {
    "llama": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "llama3-rope": LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
}
GENERAL = {
    "mistral-window": MistralConfig(**SMALL, sliding_window=4),
    "qwen2-window": Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "gemma2": Gemma2Config(**SMALL, head_dim=8, sliding_window=4),
    "qwen3-moe": Qwen3MoeConfig(
        **SMALL,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
    ),
    "gpt2": GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "gpt-neox": GPTNeoXConfig(
        **{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}, rotary_pct=0.5
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def build(config: PreTrainedConfig, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        # As initialised, norms and biases would hide a mistake in how they are applied.
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("name", LEAN)
def test_fast_path_equals_the_model_and_follows_new_weights(name: str) -> None:
    model, other = build(LEAN[name]), build(LEAN[name], seed=1)
    assert fused_decoder.supports(model)
    decoder = FusedDecoder(model)
    assert largest_gap(decoder, model, 40) < 1e-4
    copy_parts(WeightTable(model).parts(dict(other.named_parameters())))
    decoder.refresh()
    assert largest_gap(decoder, other, 40) < 1e-4


@pytest.mark.parametrize("name", [*LEAN, *GENERAL])
def test_general_path_equals_the_model(name: str) -> None:
    model = build({**LEAN, **GENERAL}[name])
    assert largest_gap(HFDecoder(model), model, 40) < 1e-4


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_general_path_equals_the_architectures_that_teams_train(family: str) -> None:
    model = tiny_architecture(family).requires_grad_(False)
    assert largest_gap(HFDecoder(model), model, 40) < 1e-5


async def test_recurrent_states_follow_their_rows(tmp_path: Path) -> None:
    """Prompts of several lengths, more than fit, answered as by the model alone."""
    model = tiny_architecture("falcon_h1")
    model.save_pretrained(tmp_path)
    engine = TransformersEngine(tiny_config(tmp_path, slots=3), NO_TOKENIZER)
    await engine.start()
    prompts = [list(range(3, 3 + n)) for n in (2, 7, 4, 7, 3)]
    requests = [
        Request(f"r{n}", np.array(prompt, np.int32), SamplingParams(5 + n, greedy=True))
        for n, prompt in enumerate(prompts)
    ]
    made = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    for prompt, (completion,) in zip(prompts, made, strict=True):
        ids = torch.tensor([[*prompt, *completion.tokens.tolist()]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert completion.tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", GENERAL)
def test_fast_path_keeps_off_what_it_does_not_know(name: str) -> None:
    assert not fused_decoder.supports(build(GENERAL[name]))


@pytest.mark.parametrize("name", LEAN)
def test_fast_path_in_bfloat16_stays_within_rounding_of_the_model(name: str) -> None:
    model = build(LEAN[name]).to(torch.bfloat16)
    assert largest_gap(FusedDecoder(model), model, 40) < 0.1


def test_a_wrong_fast_path_is_noticed_at_the_start() -> None:
    model = build(LEAN["qwen3"])
    decoder = FusedDecoder(model)
    decoder._scale *= 2.0
    assert largest_gap(decoder, model, 40) > 1e-3


async def test_a_model_without_attention_caches_is_refused_by_name(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, state_size=4)
    build(config).save_pretrained(tmp_path)
    engine = TransformersEngine(tiny_config(tmp_path), NO_TOKENIZER)
    with pytest.raises(EngineError, match=r"^the transformers engine [^\n]*\(mamba\)$"):
        await engine.start()


async def test_an_unreadable_model_is_one_clear_line(tmp_path: Path) -> None:
    engine = TransformersEngine(tiny_config(tmp_path / "none"), NO_TOKENIZER)
    with pytest.raises(EngineError, match=r"model\.path: no such directory"):
        await engine.start()
    (tmp_path / "config.json").write_text("{}")
    engine = TransformersEngine(tiny_config(tmp_path), NO_TOKENIZER)
    with pytest.raises(EngineError, match=r"^model\.path: cannot load[^\n]*$"):
        await engine.start()
