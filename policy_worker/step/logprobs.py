"""Log-probabilities of target tokens of a packed row, at the sampling temperature.

Only positions that predict a target reach the language-model head. They do so in chunks, so that
vocabulary times tokens stays bounded: a chunk's logits are recomputed in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policy_worker.step.packing import MicroBatch

LOGITS_PER_CHUNK = 1 << 25
"""Most logits held at once, in elements: 128 MiB of float32, and a few copies of it."""
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Layers that see other tokens through the attention function only."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of C target tokens: ``logprobs`` float32 [C], with graph; ``entropy`` float32 [C], without.

    Both are of softmax(logits / temperature).
    """

    logprobs: Tensor
    entropy: Tensor


class _ScoresTokens:
    """Adds to a causal language model: called with ``microbatch``, it returns TokenScores.

    It is the model's own forward rather than a function beside it, so that wrappers which work by
    hooks on the root module (FSDP) see every call.
    """

    def forward(
        self: Any,
        *args: Any,
        microbatch: MicroBatch | None = None,
        temperature: float = 1.0,
        **kwargs: Any,
    ) -> Any:
        if microbatch is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        base = getattr(self, self.base_model_prefix)
        hidden = base(
            input_ids=microbatch.input_ids,
            position_ids=microbatch.position_ids,
            packing=microbatch.packing,
            use_cache=False,
        ).last_hidden_state[0]
        return _score_in_chunks(
            self, hidden.index_select(0, microbatch.predict_from), microbatch.targets, temperature
        )


def make_scorer(model: nn.Module) -> None:
    """Teaches ``model`` (a transformers causal LM) to score packed rows, in place.

    Raises ValueError, with a reason for people, if its layers cannot run on packed rows.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or PACKABLE_LAYERS)
    if not getattr(model, "_supports_attention_backend", False) or layers - PACKABLE_LAYERS:
        raise ValueError(f"{name} has layers that do not take an attention function")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(f"{name} caps attention scores, which packed attention does not do")
    if any(hasattr(module, "sinks") for module in model.modules()):
        raise ValueError(f"{name} has attention sinks, which packed attention does not do")
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise ValueError(f"{name} has no language-model head")
    # Same name: exports write it to config.json as the architecture.
    model.__class__ = type(name, (_ScoresTokens, type(model)), {"__module__": __name__})


def score(model: nn.Module, microbatch: MicroBatch, temperature: float) -> TokenScores:
    """TokenScores of the micro-batch's targets under ``model``, which make_scorer has prepared."""
    scores: TokenScores = model(microbatch=microbatch, temperature=temperature)
    return scores


def _score_in_chunks(
    model: Any, hidden: Tensor, targets: Tensor, temperature: float
) -> TokenScores:
    head = model.get_output_embeddings()
    rows = max(1, LOGITS_PER_CHUNK // head.weight.shape[0])
    if len(targets) <= rows:
        return TokenScores(*_score_chunk(model, hidden, targets, temperature))
    parts = [
        checkpoint(_score_chunk, model, h, t, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return TokenScores(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


def _score_chunk(
    model: Any, hidden: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """hidden [c, D], targets int64 [c] -> log-probs and entropies, float32 [c]."""
    logits = _logits(model, hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return logprobs, entropy


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits [c, V] of last hidden states [c, D], as the model's own forward computes them.

    Beside the head itself: Gemma caps logits, Cohere multiplies and Granite divides them.
    """
    logits = model.get_output_embeddings()(hidden)
    config = model.config.get_text_config()
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits
