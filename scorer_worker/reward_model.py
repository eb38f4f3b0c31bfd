"""Reward models: the output of a scalar head at the last token of prompt and completion.

Source: Ouyang et al., arXiv 2203.02155, section 3.5. `paceline export` writes such a model of a
reward-model run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForSequenceClassification

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
from scorer_worker.scorer import Item, NoScore, Score, ScorerError


class RewardModelScorer(BatchedScorer):
    def __init__(self, config: Config, name: str) -> None:
        self._config, self._name = config, name
        self._scorer = config.scorers.by_name[name]
        super().__init__(self._scorer.batch_size)

    def load(self) -> None:
        field = f"scorers.{self._name}.path = {self._scorer.path!r}"
        self._device = pick_device(self._config)
        model, found = from_pretrained(
            AutoModelForSequenceClassification.from_pretrained,
            self._config,
            self._name,
            dtype=dtype_of(self._config, self._scorer),
            output_loading_info=True,
        )
        head = getattr(model, "score", None)
        if head is None:
            raise ScorerError(f"{field}: {type(model).__name__} has no head named score")
        if any(key.startswith("score.") for key in found["missing_keys"]):
            raise ScorerError(
                f"{field} has no weights of the head: it is no reward model. Train one "
                "(docs/scorers.md), or name one that was saved by AutoModelForSequenceClassification"
            )
        if model.config.num_labels != 1:
            raise ScorerError(
                f"{field} has {model.config.num_labels} outputs: a reward model has one (num_labels = 1)"
            )
        check_tokenizer(self._config, self._name, model)
        self.limit = longest(self._scorer, model)
        self.rows = model.get_input_embeddings().weight.shape[0]
        self._model = frozen(model, self._device)

    def compute(self, items: Sequence[Item]) -> list[Score]:
        with torch.inference_mode():
            return self._scores(items)

    def _scores(self, items: Sequence[Item]) -> list[Score]:
        """One number each. The head reads the last token itself, not the last one that is no
        padding: a completion may end with the padding token."""
        ids, mask = padded(items, self._device)
        hidden = self._model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        last = torch.tensor([len(item) - 1 for item in items], device=self._device)
        found = self._model.score(hidden[torch.arange(len(items), device=self._device), last])
        scores = found[:, 0].float().cpu()
        if not torch.isfinite(scores).all():
            raise NoScore(f"the reward model gave {scores.tolist()}")
        return [float(score) for score in scores]
