"""Head of a language model: logits of hidden states, by chunks of tokens. And forwards that modules
gain."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIB = 1 << 20
DEFAULT_CHUNK_MB = 128
"""MiB of float32 logits."""


def tokens_per_chunk(vocabulary: int, chunk_mb: float) -> int:
    """Tokens whose float32 logits fill at most ``chunk_mb`` MiB; at least one."""
    return max(1, int(chunk_mb * MIB) // (4 * vocabulary))


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
        logits = (logits / cap).tanh() * cap
    return logits


def has_other_logits(model: Any, device: torch.device) -> bool:
    """True if the model's own forward gives other logits than ``logits_of``: its prediction head
    has more layers, or scales of its own."""
    import torch

    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(16, device=device)[None] % vocabulary
    with torch.inference_mode():
        hidden = model.base_model(input_ids=ids, use_cache=False)[0]
        own = model(input_ids=ids, use_cache=False).logits.float()
        return not torch.allclose(own, logits_of(model, hidden).float(), atol=0.05, rtol=0.01)


def mix_in(part: type, module: Any) -> None:
    """Gives ``module`` the forward of ``part`` before its own, in place. Modules of one class share
    the result, so that compiled code is made once for all of them. The name of the class stays:
    exports write it to config.json as the architecture."""
    kind: Any = type(module)
    module.__class__ = _mixed(part, kind)


@cache
def _mixed(part: Any, kind: Any) -> type:
    return type(kind.__name__, (part, kind), {"__module__": part.__module__})
