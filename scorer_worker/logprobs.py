"""Log-probs of the tokens of a completion under a frozen language model, at the run's sampling
temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.config.schema import Config
from scorer_worker.batched_scorer import BatchedScorer
from scorer_worker.models import (
    check_tokenizer,
    dtype_of,
    from_pretrained,
    frozen,
    longest,
    padded,
    pick_device,
)
from scorer_worker.scorer import Item, NoScore, Score

LOGITS_AT_ONCE = 1 << 25
"""Logits held at once: 128 MiB of float32, and a few copies of it."""


class TokenLogprobs(BatchedScorer):
    """float32, one for each token: log softmax(logits / rollout.temperature) of the token after
    those before it. The trainer computes its own log-probs in the same way, so that the two can be
    compared."""

    def __init__(self, config: Config, name: str) -> None:
        self._config, self._name = config, name
        self._scorer = config.scorers.by_name[name]
        super().__init__(self._scorer.batch_size)

    def load(self) -> None:
        self._device = pick_device(self._config)
        model = from_pretrained(
            AutoModelForCausalLM.from_pretrained,
            self._config,
            self._name,
            dtype=dtype_of(self._config, self._scorer),
        )
        check_tokenizer(self._config, self._name, model)
        self.limit = longest(self._scorer, model)
        self.rows = model.get_input_embeddings().weight.shape[0]
        self._model = frozen(model, self._device)

    def compute(self, items: Sequence[Item]) -> list[Score]:
        with torch.inference_mode():
            return self._scores(items)

    def _scores(self, items: Sequence[Item]) -> list[Score]:
        ids, mask = padded(items, self._device)
        hidden = self._model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        # The last hidden state before a token predicts it. A prompt is never empty.
        before = torch.cat(
            [hidden[i, len(x.prompt_tokens) - 1 : len(x) - 1] for i, x in enumerate(items)]
        )
        targets = torch.cat([ids[i, len(x.prompt_tokens) : len(x)] for i, x in enumerate(items)])
        rows = max(1, LOGITS_AT_ONCE // self._model.config.get_text_config().vocab_size)
        found = [
            self._of_chunk(h, t)
            for h, t in zip(before.split(rows), targets.split(rows), strict=True)
        ]
        together = torch.cat(found).cpu().numpy().astype(np.float32)
        if not np.isfinite(together).all():
            raise NoScore("the model gave log-probs that are not finite")
        return list(np.split(together, np.cumsum([len(item.tokens) for item in items])[:-1]))

    def _of_chunk(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [c, D], targets int64 [c] -> float32 [c]."""
        logits = _logits(self._model, hidden).float() / self._config.rollout.temperature
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """As the model's own forward computes them: Gemma caps logits, Cohere multiplies and Granite
    divides them."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    config = model.config.get_text_config()
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits
