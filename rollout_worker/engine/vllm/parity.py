"""Log-prob parity of vLLM with the trainer's parameters, checked once after the first sync.

readback has compared the parameters bit by bit. This compares what vLLM computes with them (packed
or quantised for its kernels, tied, padded): the log-probabilities of sampled tokens against a plain
forward of the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from rollout_worker.engine.base import Completion, Request, SamplingParams

_ROUNDING = {"float32": 1e-3, "bfloat16": 1e-2, "float16": 5e-3}
"""Mean absolute gap of log-probabilities that counts as rounding if logits are small, by
computation type."""
_LARGEST = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
"""The same for any logits."""
_STEP = {"float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}
"""Distance of neighbouring numbers around 1."""
_QUANTISED = 0.5
"""The error of quantising has no bound; misplaced weights are further off than this."""
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
    completions: tuple[Completion, ...],
) -> tuple[list[NDArray[np.float32]], float]:
    """Log-probabilities of the completions' tokens by transformers' own forward, float32 [n] each,
    and the mean size of those tokens' logits."""
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    model = kind.from_pretrained(None, config=config, state_dict=dict(tensors), dtype=dtype).eval()
    result, sizes = [], []
    with torch.inference_mode():
        for completion in completions:
            ids = torch.from_numpy(
                np.concatenate([request.prompt_tokens, completion.tokens])
            ).long()
            start = len(request.prompt_tokens)
            logits = model(input_ids=ids[None].to(model.device)).logits[0, start - 1 : -1].float()
            tokens = ids[start:, None].to(logits.device)
            found = torch.log_softmax(logits, -1).gather(1, tokens)
            result.append(found[:, 0].cpu().numpy())
            sizes.append(logits.gather(1, tokens)[:, 0].abs().cpu())
    return result, float(torch.cat(sizes).mean())


def tolerance(dtype: str, scale: float, *, quantised: bool) -> float:
    """Largest mean gap that counts as rounding. ``scale``: mean size of the tokens' logits, which
    both sides round to the computation type."""
    if quantised:
        return _QUANTISED
    return float(np.clip(scale * _STEP[dtype], _ROUNDING[dtype], _LARGEST[dtype]))


def mean_gap(completions: tuple[Completion, ...], expected: list[NDArray[np.float32]]) -> float:
    gaps = [np.abs(s.logprobs - e) for s, e in zip(completions, expected, strict=True)]
    return float(np.concatenate(gaps).mean())
