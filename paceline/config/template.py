"""Configuration templates of `paceline init`, by algorithm and model size.

The comments are the schema's field texts, as in docs/configuration.md.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from paceline.config.schema import Config

WIDTH = 98

Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Algorithm:
    summary: str
    train: Mapping[str, Any]
    """The settings of [train] that define it."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        "GRPO: group-relative advantages, loss averaged per sequence, KL term to the initial model",
        {
            "aggregation": "sequence_mean",
            "advantage_norm": True,
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_coef": 0.04,
            "kl_estimator": "k3",
        },
    ),
    "dr-grpo": Algorithm(
        "Dr. GRPO: GRPO without its bias towards long wrong answers and easy prompts",
        {
            "aggregation": "dr_grpo",
            "advantage_norm": False,
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_coef": 0.0,
        },
    ),
    "dapo": Algorithm(
        "DAPO: loss averaged per token, higher upper clip, no groups of equal rewards, no KL term",
        {
            "aggregation": "token_mean",
            "advantage_norm": True,
            "clip_low": 0.2,
            "clip_high": 0.28,
            "kl_coef": 0.0,
            "filter_uninformative": True,
        },
    ),
    "decoupled": Algorithm(
        "Decoupled PPO (AReaL): for stale samples; truncated importance weights",
        {
            "aggregation": "token_mean",
            "advantage_norm": True,
            "max_staleness": 4,
            "proximal": "trainer",
            "tis_cap": 2.0,
            "kl_coef": 0.0,
        },
    ),
    "interpolated": Algorithm(
        "A-3PO: the proximal policy interpolates between sampler and trainer, by staleness",
        {
            "aggregation": "token_mean",
            "advantage_norm": True,
            "max_staleness": 4,
            "proximal": "interpolated",
            "tis_cap": 2.0,
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_coef": 0.0,
        },
    ),
}
"""Algorithms by name, as settings of the loss. docs/algorithms.md has the formulas."""


@dataclass(frozen=True, slots=True)
class Size:
    summary: str
    start: tuple[str, ...]
    """Commands that start a run; {out} is the file."""
    settings: Settings


_OWN_DATA = {
    "path": "train.jsonl",
    "prompt_field": "question",
    "answer_field": "answer",
    "chat": True,
    "eval_path": "held_out.jsonl",
}

SIZES: dict[str, Size] = {
    "tiny": Size(
        "the digit-sort example's model of 0.1 M parameters on two CPU cores; start it in the root "
        "of the repository",
        ("paceline up {out}",),
        {
            "run": {"name": "tiny", "seed": 0},
            "model": {"path": "examples/digit_sort/model-0.1M", "device": "cpu"},
            "data": {
                "path": "examples/digit_sort/train.jsonl",
                "prompt_field": "prompt",
                "answer_field": "answer",
                "max_prompt_tokens": 16,
                "eval_path": "examples/digit_sort/held_out.jsonl",
            },
            "reward": {"functions": ["exact_match"], "processes": 0},
            "train": {
                "steps": 100,
                "groups_per_step": 32,
                "lr": 3e-4,
                "schedule": "linear",
                "warmup_steps": 10,
                "max_staleness": 2,
                "checkpoint_every": 50,
                "eval_every": 50,
            },
            "rollout": {
                "engine": "transformers",
                "group_size": 8,
                "max_tokens": 24,
                "max_sequences": 128,
            },
            "fleet": {"controllers": 2, "policy": 1, "rollout": 1},
        },
    ),
    "small": Size(
        "a model of 0.6 B parameters; trainer and vLLM share one GPU of 24 GB or more",
        ("pip install 'paceline[vllm]'", "paceline up {out}"),
        {
            "run": {"name": "small", "seed": 0},
            "model": {"path": "Qwen/Qwen3-0.6B", "dtype": "bfloat16", "device": "cuda"},
            "data": {**_OWN_DATA, "max_prompt_tokens": 1024},
            "reward": {"functions": ["math_verify"], "timeout_s": 10.0, "processes": 2},
            "train": {
                "steps": 500,
                "groups_per_step": 32,
                "lr": 1e-6,
                "warmup_steps": 10,
                "max_staleness": 2,
                "tokens_per_microbatch": 16384,
                "checkpoint_every": 50,
                "eval_every": 50,
            },
            "rollout": {
                "engine": "vllm",
                "group_size": 8,
                "max_tokens": 1024,
                "temperature": 1.0,
                "max_sequences": 256,
                "vllm": {"gpu_memory_utilization": 0.35},
            },
            "fleet": {"controllers": 2, "policy": 1, "rollout": 1},
        },
    ),
    "7b": Size(
        "a model of 7 B parameters on eight GPUs of 80 GB: one policy replica sharded over four GPUs "
        "and four vLLM workers, placed by Ray",
        (
            "pip install 'paceline[vllm,ray]'",
            "ray start --head",
            "paceline controller {out} --controllers 127.0.0.1:7000,127.0.0.1:7001 --index 0",
            "paceline controller {out} --controllers 127.0.0.1:7000,127.0.0.1:7001 --index 1",
        ),
        {
            "run": {"name": "7b", "seed": 0},
            "model": {
                "path": "Qwen/Qwen2.5-7B-Instruct",
                "dtype": "bfloat16",
                "gradient_checkpointing": True,
                "device": "cuda",
            },
            "data": {**_OWN_DATA, "max_prompt_tokens": 2048},
            "reward": {"functions": ["math_verify"], "timeout_s": 10.0, "processes": 4},
            "train": {
                "steps": 1000,
                "groups_per_step": 64,
                "lr": 1e-6,
                "warmup_steps": 10,
                "max_staleness": 2,
                "tokens_per_microbatch": 16384,
                "checkpoint_every": 50,
                "eval_every": 50,
            },
            "rollout": {
                "engine": "vllm",
                "group_size": 8,
                "max_tokens": 4096,
                "temperature": 1.0,
                "max_sequences": 256,
                "vllm": {"gpu_memory_utilization": 0.8},
            },
            "fleet": {
                "controllers": 2,
                "policy": 1,
                "policy_ranks": 4,
                "rollout": 4,
                "provider": "ray",
            },
            "ray": {"address": "auto", "policy_gpus": 4, "rollout_gpus": 1},
        },
    ),
}


def template(algorithm: str, size: str, out: str) -> str:
    """A commented TOML file that ``load_config`` reads. Raises KeyError for an unknown choice.

    ``out``: path of the file, for the commands that it shows.
    """
    chosen, base = ALGORITHMS[algorithm], SIZES[size]
    settings = {section: dict(fields) for section, fields in base.settings.items()}
    settings["train"] = {"algorithm": "grpo", **settings["train"], **chosen.train}
    head = [
        *_comment(f"{chosen.summary}."),
        *_comment(f"Sized for {base.summary}."),
        "#",
        *(f"#     {line.format(out=out)}" for line in base.start),
        "#",
        *_comment(
            "docs/configuration.md lists all settings. Settings not in this file have defaults."
        ),
    ]
    parts = ["\n".join(head), *(_section(name, fields) for name, fields in settings.items())]
    return "\n\n".join(parts) + "\n"


def _section(section: str, fields: Mapping[str, Any]) -> str:
    """A section as TOML, with the meaning of each setting above it."""
    known = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
    lines = []
    for line in tomli_w.dumps({section: fields}).splitlines():
        name = re.match(rf"(?:\[{section}\.)?(\w+)(?: =|\]$)", line)
        if name and name[1] in known:
            lines += _comment(" ".join((known[name[1]].description or "").split()))
        lines.append(line)
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
