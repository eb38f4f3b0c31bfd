"""Tiny networks of several families and random groups, for tests of the trainer's mathematics."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.config.schema import Config
from paceline.v1 import common_pb2, rollout_pb2
from policy_worker import attention
from policy_worker.logprobs import make_scorer

VOCAB = 20


def tiny_network(family: str, *, scorer: bool = True, seed: int = 0):
    """A random causal LM: 2 layers, 4 heads, 2 KV heads, float32, about 20 k parameters."""
    attention.register()
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    if family == "gemma2":  # one layer with a sliding window, and capped logits
        shape |= {
            "sliding_window": 8,
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": None,
        }
    config = AutoConfig.for_model(family, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if scorer:
        make_scorer(model)
    return model


def make_group(task_id, prompt, completions, rewards, *, logprobs=None, versions=None, masks=None):
    """A Group from plain lists; one version span (0) a completion unless ``versions`` says more."""
    group = rollout_pb2.Group(
        task=common_pb2.TaskRef(task_id=task_id, attempt=1),
        kind=rollout_pb2.TASK_KIND_TRAIN,
        prompt_tokens=np.asarray(prompt, "<i4").tobytes(),
    )
    for i, tokens in enumerate(completions):
        behaviour = logprobs[i] if logprobs else [-1.0] * len(tokens)
        group.completions.add(
            tokens=np.asarray(tokens, "<i4").tobytes(),
            logprobs=np.asarray(behaviour, "<f4").tobytes(),
            versions=[
                common_pb2.VersionSpan(version=v, length=n)
                for v, n in (versions[i] if versions else [(0, len(tokens))])
            ],
            finish_reason=rollout_pb2.FINISH_REASON_STOP,
            reward=rewards[i],
            loss_mask=bytes(masks[i]) if masks else b"",
        )
    return group


def random_groups(count, *, group_size, seed, shortest=1, longest=9, first=0, vocab=VOCAB):
    """``count`` groups of random tokens, lengths, log-probs near log(1/VOCAB), rewards 0 or 1."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(count):
        lengths = rng.integers(shortest, longest + 1, group_size)
        groups.append(
            make_group(
                f"t{first + g}",
                rng.integers(0, vocab, rng.integers(2, 8)),
                [rng.integers(0, vocab, n) for n in lengths],
                rng.integers(0, 2, group_size).astype(float).tolist(),
                logprobs=[-3 + 0.3 * rng.standard_normal(n).clip(-2, 2) for n in lengths],
            )
        )
    return groups


def make_config(*, model="unused", **sections):
    """A Config whose sections default to a tiny, quiet run; keyword arguments override fields."""
    train = {"groups_per_step": 4, "steps": 10, "lr": 1e-2, **sections.pop("train", {})}
    rollout = {"group_size": 3, "max_tokens": 16, **sections.pop("rollout", {})}
    return Config.model_validate(
        {
            "model": {"path": str(model), "device": "cpu", **sections.pop("model_section", {})},
            "data": {"path": "unused"},
            "train": train,
            "rollout": rollout,
            **sections,
        }
    )
