"""Head of a causal language model, for the hidden states that are asked for alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Logits [..., V] of last hidden states [..., D], as the forward of transformers' models
    computes them: Gemma caps logits, Cohere multiplies and Granite divides them."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    config = model.config.get_text_config()
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


def has_other_logits(model: Any, device: torch.device) -> bool:
    """True if the model's own forward gives other logits than ``logits_of``: its prediction head
    has more layers, or scales of its own."""
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(16, device=device)[None] % rows
    with torch.inference_mode():
        hidden = model.base_model(input_ids=ids, use_cache=False)[0]
        own = model(input_ids=ids, use_cache=False).logits.float()
        return not torch.allclose(own, logits_of(model, hidden).float(), atol=0.05, rtol=0.01)
