"""Are the engine's parameters the trainer's? Asked once, after the first sync.

The bytes are known to be right: the link checks each bucket, each rank the whole segment. What is
checked here is what vLLM made of them (fused, sharded, padded, packed for its kernels, tied): the
log-probabilities of tokens it sampled against a plain forward of the same tensors. Parameters
cannot be compared themselves: the CPU kernels keep no unpacked copy.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from rollout_worker.engine.base import Request, Sample, SamplingParams

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
"""Mean absolute gap of log-probabilities that counts as rounding, by computation type."""
_PROMPT = 8
_TOKENS = 16


def probe(vocabulary: int, context: int) -> Request:
    """A short request over tokens from the whole vocabulary, the same on every call."""
    prompt = (np.arange(1, _PROMPT + 1) * (vocabulary // (_PROMPT + 1) or 1)) % vocabulary
    length = max(1, min(_PROMPT, context // 2))
    tokens = max(1, min(_TOKENS, context - length))
    return Request(
        "first-sync", prompt[:length].astype(np.int32), SamplingParams(tokens, seed=1), count=4
    )


def plain_logprobs(
    config: PretrainedConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    request: Request,
    samples: tuple[Sample, ...],
) -> list[NDArray[np.float32]]:
    """Log-probabilities of the samples' tokens by transformers' own forward. float32 [n] each."""
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    model = kind.from_pretrained(None, config=config, state_dict=dict(tensors), dtype=dtype).eval()
    result = []
    with torch.inference_mode():
        for sample in samples:
            ids = torch.from_numpy(np.concatenate([request.prompt_tokens, sample.tokens])).long()
            start = len(request.prompt_tokens)
            logits = model(input_ids=ids[None].to(model.device)).logits[0, start - 1 : -1].float()
            found = torch.log_softmax(logits, -1).gather(1, ids[start:, None].to(logits.device))
            result.append(found[:, 0].cpu().numpy())
    return result


def mean_gap(samples: tuple[Sample, ...], expected: list[NDArray[np.float32]]) -> float:
    gaps = [np.abs(s.logprobs - e) for s, e in zip(samples, expected, strict=True)]
    return float(np.concatenate(gaps).mean())
