"""Models of scorers: loading, the fit of their tokenizer, and padded batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from paceline.config.schema import Config
from paceline.config.sections.scorers import ScorerConfig
from paceline.errors import one_line
from scorer_worker.scorer import Item, ScorerError


def pick_device(config: Config) -> torch.device:
    desired = config.model.device
    if desired == "cuda" and not torch.cuda.is_available():
        raise ScorerError(
            "model.device = 'cuda', but torch finds no CUDA device: use 'auto' or 'cpu'"
        )
    if desired == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def from_pretrained(load: Callable[..., Any], config: Config, name: str, **arguments: Any) -> Any:
    """Calls a ``from_pretrained`` on the scorer's path. Raises ScorerError."""
    transformers_logging.disable_progress_bar()
    path = str(config.scorers.by_name[name].path)
    try:
        return load(path, trust_remote_code=config.model.trust_remote_code, **arguments)
    except Exception as error:  # whatever makes a user's files unreadable
        missing = path.startswith(("/", ".")) and not Path(path).is_dir()
        why = "no such directory" if missing else one_line(error)
        raise ScorerError(
            f"scorers.{name}.path = {path!r} cannot be loaded ({why}): name a model's directory or a hub name"
        ) from error


def dtype_of(config: Config, scorer: ScorerConfig) -> torch.dtype:
    name = config.model.dtype if scorer.dtype == "auto" else scorer.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def frozen(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    return model.to(device).eval().requires_grad_(False)


def longest(config: ScorerConfig, model: PreTrainedModel) -> int:
    """Tokens of prompt and completion that the model takes."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (config.max_context, positions) if limit]
    return min(limits, default=1 << 30)


def check_tokenizer(config: Config, name: str, model: PreTrainedModel) -> None:
    """Raises ScorerError if token ids of the run mean something else to ``model``."""
    ours = config.model.tokenizer or config.model.path
    path = str(config.scorers.by_name[name].path)
    remedy = "Give a model with the tokenizer of the run, or use a judge, which reads text"
    vocabulary = _vocabulary(ours, config)
    rows = model.get_input_embeddings().weight.shape[0]
    if max(vocabulary.values(), default=0) >= rows:
        raise ScorerError(
            f"scorers.{name}.path: {path} knows {rows} tokens, and the tokenizer of the run ({ours}) has ids up to "
            f"{max(vocabulary.values())}. {remedy}"
        )
    theirs = _vocabulary(path, config)
    # A model that was saved without its tokenizer says nothing about it.
    differing = [t for t, i in vocabulary.items() if theirs.get(t) != i] if len(theirs) > 8 else []
    if differing:
        raise ScorerError(
            f"scorers.{name}.path: the tokenizer of {path} is not that of the run ({ours}): {len(differing)} tokens "
            f"differ, such as {differing[0]!r}. {remedy}"
        )


def _vocabulary(path: str, config: Config) -> dict[str, int]:
    """Empty if there is no tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=config.model.trust_remote_code
        )
    except Exception:  # transformers raises anything for a directory without one
        return {}
    return dict(tokenizer.get_vocab())


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
