"""Sampling, vectorised over the batch, in float32.

Inverse transform sampling with one uniform number per row: a row's token depends only on its own
logits, parameters and random number. A token of probability 0 is never drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplerRows:
    """Sampling parameters of the batch's rows; arrays of length [rows]."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    """0: off."""
    greedy: NDArray[np.bool_]
    uniform: NDArray[np.float32]
    """In (0, 1)."""


def sample(logits: Tensor, rows: SamplerRows) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draws one token per row. ``logits``: float32 [rows, vocabulary]; may be overwritten.

    Returns tokens int64 [rows] and the log-probability of each under the distribution it was drawn
    from, float32 [rows]. A row whose logits are not finite has a log-probability that is not.
    """
    filtered = ((rows.top_p < 1) | (rows.top_k > 0)) & ~rows.greedy
    if rows.greedy.any() or filtered.any():
        return _mixed(logits, rows, filtered)
    tokens, logprobs = _plain(logits, rows.temperature, rows.uniform)
    return tokens.cpu().numpy(), logprobs.cpu().numpy()


def _mixed(
    logits: Tensor, rows: SamplerRows, filtered: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    tokens = np.empty(len(logits), dtype=np.int64)
    logprobs = np.empty(len(logits), dtype=np.float32)
    for where, draw in (
        (rows.greedy, lambda part, i: _greedy(part)),
        (filtered, lambda part, i: _filtered(part, rows, i)),
        (
            ~rows.greedy & ~filtered,
            lambda part, i: _plain(part, rows.temperature[i], rows.uniform[i]),
        ),
    ):
        index = np.flatnonzero(where)
        if len(index) == 0:
            continue
        part = logits if len(index) == len(logits) else logits[_on(index, logits)]
        chosen, logprob = draw(part, index)
        tokens[index] = chosen.cpu().numpy()
        logprobs[index] = logprob.cpu().numpy()
    return tokens, logprobs


def _greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    logprob, token = torch.log_softmax(logits, -1).max(-1)
    return token, logprob


def _plain(
    logits: Tensor, temperature: NDArray[np.float32], uniform: NDArray[np.float32]
) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(_tempered(logits, temperature), -1)
    token = _invert(logprobs.exp(), _on(uniform, logits))
    return token[:, 0], logprobs.gather(1, token)[:, 0]


def _filtered(logits: Tensor, rows: SamplerRows, index: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Top-k, then top-p within what top-k kept, each renormalised."""
    scaled = _tempered(logits, rows.temperature[index])
    top_k = rows.top_k[index]
    if top_k.all() and (widest := int(top_k.max())) < scaled.shape[1]:
        ordered, order = scaled.topk(widest, -1)
    else:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    limit = _on(np.where(top_k > 0, top_k, scaled.shape[1]), logits)[:, None]
    rank = torch.arange(ordered.shape[1], device=logits.device)
    p = torch.softmax(ordered.masked_fill(rank >= limit, -torch.inf), -1)
    before = p.cumsum(-1) - p
    # The first token is always kept: the mass before it is 0, and top_p is positive.
    p = p * (before < _on(rows.top_p[index], logits)[:, None])
    place = _invert(p, _on(rows.uniform[index], logits))
    logprob = (p.gather(1, place) / p.sum(-1, keepdim=True)).log().clamp_(max=0.0)
    return order.gather(1, place)[:, 0], logprob[:, 0]


def _tempered(logits: Tensor, temperature: NDArray[np.float32]) -> Tensor:
    if (temperature == 1).all():
        return logits
    return logits / _on(temperature, logits)[:, None]


def _invert(p: Tensor, uniform: Tensor) -> Tensor:
    """First index at which the cumulative sum passes uniform * total. int64 [rows, 1]."""
    cumulative = p.cumsum(-1)
    total = cumulative[:, -1]
    # Rounding may carry the product up to the total itself, which no index would pass.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target[:, None], right=True)
    return found.clamp_(max=p.shape[1] - 1)


def _on(array: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
