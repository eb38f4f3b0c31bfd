"""Scorers with a model of their own over token ids: log-probs of each token, and reward models."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from paceline.config.model_files import difference, load_pretrained
from paceline.config.schema import Config
from paceline.model_head import (
    DEFAULT_CHUNK_MB,
    has_other_logits,
    logits_of,
    tokens_per_chunk,
)
from paceline.process.compute_device import compute_dtype, pick_device
from paceline.process.parked_memory import ParkedMemory, in_its_room
from scorer_worker.scorer import BatchedScorer, Item, NoScore, Score, ScorerError


def check_tokens(config: Config, name: str) -> None:
    """Raises ScorerError if token ids of the run mean something else to the scorer's model."""
    ours, path = config.model.tokenizer or config.model.path, str(config.scorers.by_name[name].path)
    if why := difference(ours, path, exact=False):
        raise ScorerError(
            f"scorers.{name}.path: {path} has other tokens than the run, {ours} ({why}). Give a "
            "model with the tokenizer of the run, or use a judge, which reads text"
        )


def padded(items: Sequence[Item], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 [B, L]: prompt and completion of each item, padded on the
    right."""
    longest = max(len(item) for item in items)
    ids = torch.zeros((len(items), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(items):
        split = len(item.prompt_tokens)
        ids[row, :split] = torch.from_numpy(item.prompt_tokens.astype("int64"))
        ids[row, split : len(item)] = torch.from_numpy(item.tokens.astype("int64"))
        mask[row, : len(item)] = 1
    return ids.to(device), mask.to(device)


class ModelScorer(BatchedScorer):
    """Base class of scorers that read the hidden states of one forward pass over token ids."""

    def __init__(self, config: Config, name: str) -> None:
        self._config, self._name = config, name
        self._scorer = config.scorers.by_name[name]
        super().__init__(self._scorer.batch_size, parked=config.scorer_shares(name))

    @abstractmethod
    def open_model(self) -> PreTrainedModel:
        """Raises ScorerError."""

    @abstractmethod
    def scores(self, items: Sequence[Item], ids: Tensor, hidden: Tensor) -> list[Score]:
        """``ids`` int64 [B, L], ``hidden`` [B, L, D]: of prompt and completion, padded on the
        right."""

    def from_pretrained(self, model_class: Any, **arguments: Any) -> Any:
        """Calls ``model_class.from_pretrained`` on the scorer's path. Raises ScorerError."""
        transformers_logging.disable_progress_bar()
        dtype = compute_dtype(self._config.model, self._device.type, self._scorer.dtype)
        return load_pretrained(
            model_class.from_pretrained,
            f"scorers.{self._name}.path",
            str(self._scorer.path),
            ScorerError,
            dtype=getattr(torch, dtype),
            trust_remote_code=self._config.model.trust_remote_code,
            **arguments,
        )

    def load(self) -> None:
        self._device = pick_device(self._config.model.device)
        model = self.open_model()
        check_tokens(self._config, self._name)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        limits = [limit for limit in (self._scorer.max_context, positions) if limit]
        self.limit = min(limits, default=1 << 30)
        self.rows = model.get_input_embeddings().weight.shape[0]
        self._model = model.eval().requires_grad_(False)
        self._memory = ParkedMemory(self._device)
        if not self.parked:
            self._model.to(self._device)

    async def park(self) -> None:
        await self.device_use.acquire()
        model = self._model
        await self.in_thread(self._memory.copy, [], [*model.parameters(), *model.buffers()])
        await self.in_thread(self._memory.park)
        self.parked = True

    async def unpark(self) -> None:
        if self._memory.parked:
            await self.in_thread(self._memory.unpark)
        else:  # its first turn: the model is where it was loaded, in host memory
            await self.in_thread(in_its_room, self._device, lambda: self._model.to(self._device))
        self.parked = False
        self.device_use.release()

    def compute(self, items: Sequence[Item]) -> list[Score]:
        with torch.inference_mode():
            ids, mask = padded(items, self._device)
            hidden = self._model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
            return self.scores(items, ids, hidden)


class TokenLogprobs(ModelScorer):
    """float32, one for each token: log softmax(logits / rollout.temperature) of the token after
    those before it. The trainer computes its own log-probs in the same way, so that the two can be
    compared."""

    def open_model(self) -> PreTrainedModel:
        return self.from_pretrained(AutoModelForCausalLM)

    def load(self) -> None:
        super().load()
        if has_other_logits(self._model, self._model.device):
            raise ScorerError(
                f"scorers.{self._name}.path = {self._scorer.path!r}: "
                f"{type(self._model).__name__} has a prediction head that a scorer does not know, "
                "and its log-probs would be wrong: name a model of another architecture"
            )

    def scores(self, items: Sequence[Item], ids: Tensor, hidden: Tensor) -> list[Score]:
        # The last hidden state before a token predicts it. A prompt is never empty.
        before = torch.cat(
            [hidden[i, len(x.prompt_tokens) - 1 : len(x) - 1] for i, x in enumerate(items)]
        )
        targets = torch.cat([ids[i, len(x.prompt_tokens) : len(x)] for i, x in enumerate(items)])
        vocabulary = self._model.config.get_text_config().vocab_size
        rows = tokens_per_chunk(vocabulary, DEFAULT_CHUNK_MB)
        found = []
        for hidden_chunk, chunk in zip(before.split(rows), targets.split(rows), strict=True):
            logits = logits_of(self._model, hidden_chunk).float() / self._config.rollout.temperature
            found.append(logits.log_softmax(-1).gather(1, chunk[:, None])[:, 0])
        together = torch.cat(found).cpu().numpy().astype(np.float32)
        if not np.isfinite(together).all():
            raise NoScore("the model gave log-probs that are not finite")
        return list(np.split(together, np.cumsum([len(item.tokens) for item in items])[:-1]))


class RewardModelScorer(ModelScorer):
    """The output of a scalar head at the last token of prompt and completion. Source: Ouyang et
    al., arXiv 2203.02155, section 3.5. `paceline export` writes such a model of a reward-model run.
    """

    def open_model(self) -> PreTrainedModel:
        field = f"scorers.{self._name}.path = {self._scorer.path!r}"
        model, found = self.from_pretrained(
            AutoModelForSequenceClassification, output_loading_info=True
        )
        head = getattr(model, "score", None)
        if head is None:
            raise ScorerError(f"{field}: {type(model).__name__} has no head named score")
        if any(key.startswith("score.") for key in found["missing_keys"]):
            raise ScorerError(
                f"{field} has no weights of the head: it is no reward model. Train one "
                "(docs/scorers.md), or name one that was saved by "
                "AutoModelForSequenceClassification"
            )
        if model.config.num_labels != 1:
            raise ScorerError(
                f"{field} has {model.config.num_labels} outputs: a reward model has one "
                "(num_labels = 1)"
            )
        return model

    def scores(self, items: Sequence[Item], ids: Tensor, hidden: Tensor) -> list[Score]:
        """One number each. The head reads the last token itself, not the last one that is not
        padding: a completion may end with the padding token."""
        last = torch.tensor([len(item) - 1 for item in items], device=self._device)
        found = self._model.score(hidden[torch.arange(len(items), device=self._device), last])
        scores = found[:, 0].float().cpu()
        if not torch.isfinite(scores).all():
            raise NoScore(f"the reward model gave {scores.tolist()}")
        return [float(score) for score in scores]
