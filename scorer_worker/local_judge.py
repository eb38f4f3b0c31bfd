"""Judge whose model this process loads: replies in batches, by the generation of transformers.

For a large judge, serve it with vLLM and name its url: that is many times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.config.schema import Config
from paceline.process.compute_device import compute_dtype, pick_device
from scorer_worker.model_scorers import from_pretrained, frozen
from scorer_worker.scorer import BatchedScorer, Item, NoScore, Score
from scorer_worker.url_judge import request_about, score_in


class LocalJudge(BatchedScorer):
    """A judge that reads text, so its tokenizer may be another one than the run's."""

    def __init__(self, config: Config, name: str) -> None:
        self._config, self._name = config, name
        self._scorer = config.scorers.by_name[name]
        super().__init__(self._scorer.batch_size)
        self.limit = self._scorer.max_context or 1 << 30
        self.rows = 1 << 31

    def load(self) -> None:
        self._device = pick_device(self._config.model.device)
        dtype = compute_dtype(self._config.model, self._device.type, self._scorer.dtype)
        load = AutoModelForCausalLM.from_pretrained
        model = from_pretrained(load, self._config, self._name, dtype=getattr(torch, dtype))
        self._tokenizer: Any = from_pretrained(
            AutoTokenizer.from_pretrained, self._config, self._name, padding_side="left"
        )
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model: Any = frozen(model, self._device)

    def compute(self, items: Sequence[Item]) -> list[Score]:
        left = dict(enumerate(request_about(item, self._scorer) for item in items))
        scores: dict[int, Score] = {}
        # A greedy reply is the same every time.
        attempts = self._scorer.attempts if self._scorer.temperature else 1
        for attempt in range(attempts):
            for index, reply in zip(list(left), self._replies(list(left.values())), strict=True):
                try:
                    scores[index] = score_in(reply, self._scorer)
                    del left[index]
                except NoScore:
                    if attempt == attempts - 1:
                        raise
        return [scores[index] for index in range(len(items))]

    def _replies(self, requests: list[str]) -> list[str]:
        if not requests:
            return []
        if self._tokenizer.chat_template:
            requests = [
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
                )
                for text in requests
            ]
        special = not self._tokenizer.chat_template
        given = self._tokenizer(
            requests, return_tensors="pt", padding=True, add_special_tokens=special
        ).to(self._device)
        sampling: dict[str, Any] = {"do_sample": False}
        if self._scorer.temperature:
            sampling = {"do_sample": True, "temperature": self._scorer.temperature}
        with torch.inference_mode():
            made = self._model.generate(
                input_ids=given["input_ids"],
                attention_mask=given["attention_mask"],
                max_new_tokens=self._scorer.max_tokens,
                pad_token_id=self._tokenizer.pad_token_id,
                **sampling,
            )
        new = made[:, given["input_ids"].shape[1] :]
        found: list[str] = self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return found
