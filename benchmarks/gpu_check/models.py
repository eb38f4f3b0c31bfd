"""Models and groups of the GPU check, made on the spot: nothing is read from a hub."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from paceline.config.schema import Config
from paceline.config.sections.inputs import LoraConfig
from paceline.ids import Step, Version
from paceline.lora import adapters_of, attach, initial
from paceline.process.compute_device import attention_of, compiles
from paceline.v1 import common_pb2, rollout_pb2
from policy_worker.model import attention
from policy_worker.model.heads import make_scorer
from policy_worker.model.policy_model import ATTENTION, compile_model
from policy_worker.model.train_state import TrainState
from policy_worker.step.gradients import Gradients
from policy_worker.step.optimizer import build_optimizer

COMPLETIONS = 8
"""Completions of a group."""


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = True

    @property
    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=128 if self.hidden >= 1024 else 16,
            max_position_embeddings=40_960,
            tie_word_embeddings=self.tied,
        )


QWEN3_0_6B = Shape("Qwen3 0.6B", 1024, 3072, 28, 16, 8, 151_936)
QWEN3_1_7B = Shape("Qwen3 1.7B", 2048, 6144, 28, 16, 8, 151_936)
QWEN3_4B = Shape("Qwen3 4B", 2560, 9728, 36, 32, 8, 151_936)
QWEN3_8B = Shape("Qwen3 8B", 4096, 12_288, 36, 32, 8, 151_936, tied=False)
TOY = Shape("toy", 64, 192, 2, 4, 2, 512)


def run_config(
    dtype: str,
    row_tokens: int,
    *,
    attention: str = "auto",
    compiled: bool | str = "auto",
    gradient_checkpointing: bool = False,
    lora: dict[str, object] | None = None,
    **memory: object,
) -> Config:
    """``row_tokens``: of a row as it is. Its limit counts a prompt once for each completion."""
    return Config.model_validate(
        {
            "model": {
                "path": "unused",
                "dtype": dtype,
                "attention": attention,
                "compile": compiled,
                "gradient_checkpointing": gradient_checkpointing,
                "lora": lora,
            },
            "data": {"path": "unused"},
            "train": {"memory": {"tokens_per_microbatch": 2 * row_tokens, **memory}},
            "rollout": {"group_size": COMPLETIONS, "max_tokens": row_tokens},
        }
    )


def make_model(shape: Shape, device: torch.device, lora: LoraConfig | None = None) -> nn.Module:
    """The same float32 weights on every device: they are drawn on the CPU if the model is small.
    With ``lora`` they are bfloat16 and frozen, under float32 adapters."""
    dtype = torch.float32 if lora is None else torch.bfloat16
    attention.register()
    torch.manual_seed(0)
    with torch.device("cpu" if shape is TOY else device):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=dtype)
    model = model.to(device)
    make_scorer(model)
    if lora is not None:
        attach(model, lora)
        for name, adapter in adapters_of(model).items():
            adapter.data.copy_(initial(name, adapter.shape, lora, seed=0))
    return model


def make_gradients(model: nn.Module, config: Config, device: torch.device) -> Gradients:
    attention.register()
    model.set_attn_implementation(ATTENTION[attention_of(config.model)])  # type: ignore[operator]
    if compiles(config.model):
        compile_model(model)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        model.train()
    optimizer = build_optimizer({"policy": model}, config.train)
    return Gradients(TrainState({"policy": model}, optimizer, Step(0), Version(0), config), device)


def make_group(shape: Shape, row_tokens: int, seed: int = 0) -> rollout_pb2.Group:
    """A group that makes one row of ``row_tokens``: a prompt of a sixteenth, and completions whose
    lengths differ up to tenfold, from seed to seed too. Last tokens are not in the row."""
    rng = np.random.default_rng(seed)
    prompt = max(4, row_tokens // 16)
    cuts = np.sort(rng.random(COMPLETIONS - 1))
    shares = 0.3 / COMPLETIONS + 0.7 * np.diff(np.r_[0.0, cuts, 1.0])
    ends = np.r_[0, (np.cumsum(shares) * (row_tokens - prompt)).round().astype(int)]
    group = rollout_pb2.Group(
        task=common_pb2.TaskRef(task_id=f"t{seed}", attempt=1),
        prompt_tokens=rng.integers(0, shape.vocabulary, prompt).astype("<i4").tobytes(),
    )
    for index, length in enumerate((np.diff(ends) + 1).tolist()):
        group.completions.add(
            tokens=rng.integers(0, shape.vocabulary, length).astype("<i4").tobytes(),
            logprobs=np.full(length, -np.log(shape.vocabulary), "<f4").tobytes(),
            versions=[common_pb2.VersionSpan(version=0, length=length)],
            reward=float(index % 2),
        )
    return group


def trained_tokens(group: rollout_pb2.Group) -> int:
    return sum(len(completion.tokens) // 4 for completion in group.completions)
