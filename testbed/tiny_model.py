"""A tiny causal language model and its tokenizer, made from scratch for each test."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


def make_char_tokenizer(vocab: str) -> PreTrainedTokenizerFast:
    """A token per character of ``vocab``; ids 0, 1, 2 are pad, bos and eos. Adds no special token.

    Characters outside ``vocab`` encode as pad, the unknown token.
    """
    ids = {token: i for i, token in enumerate([PAD, BOS, EOS, *vocab])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=PAD
    )


def make_tiny_model(
    path: str | Path,
    vocab: str = "0123456789s=",
    hidden: int = 64,
    layers: int = 2,
    seed: int = 0,
    experts: int = 0,
) -> Path:
    """Writes a randomly initialised Qwen3 (4 heads, 2 KV heads, tied embeddings) and its tokenizer.
    With ``experts`` it is a mixture of that many experts, of which each token goes to two.

    Returns ``path`` as a Path; ``AutoModelForCausalLM`` and ``AutoTokenizer`` load it. float32.
    About 0.1 M parameters by default. The same arguments give the same bytes.
    """
    path = Path(path)
    tokenizer = make_char_tokenizer(vocab)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": max(hidden // 4, 8),
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    routed = {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden // 2,
        "norm_topk_prob": True,
    }
    config = Qwen3MoeConfig(**shape, **routed) if experts else Qwen3Config(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_tiny_reward_model(path: str | Path, model: str | Path, seed: int = 0) -> Path:
    """Writes a reward model: the body and tokenizer of ``model``, with a random scalar head."""
    path = Path(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    made.save_pretrained(path)
    AutoTokenizer.from_pretrained(model).save_pretrained(path)
    return path


def make_endless_model(path: str | Path, hidden: int = 64) -> Path:
    """A tiny model without an end-of-sequence token: every completion has as many tokens as
    allowed."""
    path = make_tiny_model(path, hidden=hidden)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
