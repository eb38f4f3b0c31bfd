"""Tiny shapes of the architectures that teams train, as settings of their configurations."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 40
_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "bos_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_LATENT = {
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_WIDE = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "head_dim",
    "linear_head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "mamba_d_head",
    "mamba_d_ssm",
    "mamba_head_dim",
)
_READ_BY_VLLM = ("head_dim", "topk_method")
"""Fields that published checkpoints have, and the configurations of transformers may lack."""
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "mistral": {},
    "ministral3": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3_moe": _EXPERTS,
    "glm4_moe": {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **_EXPERTS,
        **_LATENT,
        "n_routed_experts": 4,
        "q_lora_rank": 8,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
    },
    "qwen3_next": {**_SHARED, **_DELTA},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_SHARED, **_DELTA},
    "kimi_linear": {
        **_EXPERTS,
        **_LATENT,
        "num_experts_per_token": 2,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "layer_types": _DELTA["layer_types"],
    },
    "olmo_hybrid": _DELTA,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "expand": 1,
    },
    "granitemoehybrid": {
        **_MAMBA,
        **_EXPERTS,
        "mamba_expand": 2,
        "num_local_experts": 4,
        "shared_intermediate_size": 16,
        "layer_types": _DELTA["layer_types"],
    },
    "bamba": {**_MAMBA, "mamba_expand": 2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


def tiny_config(
    family: str,
    *,
    vocabulary: int = VOCABULARY,
    pad: int = 0,
    eos: int = 2,
    width: int = 1,
) -> Any:
    """The configuration of such a model. ``width``: factor of its heads and hidden states."""
    wanted: dict[str, Any] = {**_COMMON, **ARCHITECTURES[family]}
    wanted |= {name: width * wanted[name] for name in _WIDE if name in wanted}
    wanted |= {"vocab_size": vocabulary, "pad_token_id": pad, "eos_token_id": eos}
    default = AutoConfig.for_model(family)
    named = (name for name in wanted if hasattr(default, name) or name in _READ_BY_VLLM)
    given = {name: wanted[name] for name in named}
    return AutoConfig.for_model(family, **given)


def tiny_architecture(
    family: str,
    *,
    attention: str | None = None,
    vocabulary: int = VOCABULARY,
    pad: int = 0,
    eos: int = 2,
    seed: int = 0,
    width: int = 1,
) -> Any:
    """A random causal LM in float32, in evaluation mode. ``attention``: its implementation."""
    config = tiny_config(family, vocabulary=vocabulary, pad=pad, eos=eos, width=width)
    chosen: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, **chosen).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # as initialised, norms and biases hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
