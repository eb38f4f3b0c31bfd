"""Sampling, vectorised over the batch, in float32. Inverse transform sampling with one uniform
number per row: a row's token depends only on its own logits, parameters and random number. A token
of probability 0 is never drawn."""

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.process.compute_device import to_device

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finaliser of SplitMix64 (Steele, Lea and Flood, 2014). Wraps around on purpose.
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def sample_keys(seed: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A key for each completion of a request. uint64 [n]."""
    base = _mix(np.array([seed & _MASK], dtype=np.uint64) + _GOLDEN)
    return _mix(base ^ _mix((indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN))


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Uniform in (0, 1) for the token at each position of its completion. float32 [n]."""
    bits = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # 23 bits and a half: exact in float32, never 0 and never 1.
    return ((bits >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


@dataclass(frozen=True, slots=True)
class SamplerRows:
    """Sampling parameters of the batch's rows; arrays of length [rows]."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]  # 0: off
    greedy: NDArray[np.bool_]
    uniform: NDArray[np.float32]  # In (0, 1)

    @property
    def filtered(self) -> NDArray[np.bool_]:
        return ((self.top_p < 1) | (self.top_k > 0)) & ~self.greedy

    def take(self, index: NDArray[np.int64]) -> "SamplerRows":
        return SamplerRows(*(getattr(self, column.name)[index] for column in fields(self)))


def sample(logits: Tensor, rows: SamplerRows) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draws one token per row. ``logits``: float32 [rows, vocabulary]; may be overwritten. Returns
    tokens int64 [rows] and the log-probability of each under the distribution it was drawn from,
    float32 [rows]. A row whose logits are not finite has a log-probability that is not."""
    filtered = rows.filtered
    plain = ~(rows.greedy | filtered)
    kinds = ((plain, _plain), (rows.greedy, _greedy), (filtered, _filtered))
    for where, kind in kinds:
        if where.all():
            token, logprob = kind(logits, rows)
            return token.cpu().numpy(), logprob.cpu().numpy()
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(logits), device=logits.device)
    for where, kind in kinds:
        if len(index := np.flatnonzero(where)):
            at = on_device(index, logits.device)
            tokens[at], logprobs[at] = kind(logits[at], rows.take(index))
    return tokens.cpu().numpy(), logprobs.cpu().numpy()


def draw(scaled: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A token per row, and its log-prob, from logits over their temperature, float32 [rows,
    vocabulary]. ``uniform``: float32 [rows] in (0, 1)."""
    logprobs = torch.log_softmax(scaled, -1)
    token = _invert(logprobs.exp(), uniform)
    return token[:, 0], logprobs.gather(1, token)[:, 0]


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, and its log-prob."""
    logprob, token = torch.log_softmax(logits, -1).max(-1)
    return token, logprob


def _greedy(logits: Tensor, rows: SamplerRows) -> tuple[Tensor, Tensor]:
    return likeliest(logits)


def _plain(logits: Tensor, rows: SamplerRows) -> tuple[Tensor, Tensor]:
    return draw(_tempered(logits, rows), on_device(rows.uniform, logits.device))


def _filtered(logits: Tensor, rows: SamplerRows) -> tuple[Tensor, Tensor]:
    """Top-k, then top-p within what top-k kept, each renormalised."""
    scaled, top_k = _tempered(logits, rows), rows.top_k
    if top_k.all() and (widest := int(top_k.max())) < scaled.shape[1]:
        ordered, order = scaled.topk(widest, -1)
    else:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    limit = on_device(np.where(top_k > 0, top_k, scaled.shape[1]), logits.device)[:, None]
    rank = torch.arange(ordered.shape[1], device=logits.device)
    p = torch.softmax(ordered.masked_fill(rank >= limit, -torch.inf), -1)
    before = p.cumsum(-1) - p
    # The first token is always kept: the mass before it is 0, and top_p is positive.
    p = p * (before < on_device(rows.top_p, logits.device)[:, None])
    place = _invert(p, on_device(rows.uniform, logits.device))
    logprob = (p.gather(1, place) / p.sum(-1, keepdim=True)).log().clamp_(max=0.0)
    return order.gather(1, place)[:, 0], logprob[:, 0]


def _tempered(logits: Tensor, rows: SamplerRows) -> Tensor:
    if (rows.temperature == 1).all():
        return logits
    return logits / on_device(rows.temperature, logits.device)[:, None]


def _invert(p: Tensor, uniform: Tensor) -> Tensor:
    """First index at which the cumulative sum passes uniform * total. int64 [rows, 1]."""
    cumulative = p.cumsum(-1)
    # Closer to 1, rounding may carry the product up to the total itself, which no index would pass.
    target = uniform.clamp(max=1 - 2.0**-23) * cumulative[:, -1]
    found = torch.searchsorted(cumulative, target[:, None], right=True)
    return found.clamp_(max=p.shape[1] - 1)


def on_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor there; the host does not wait for the copy."""
    if device.type == "cuda":
        return to_device([array], device)[0]
    return torch.from_numpy(np.ascontiguousarray(array))
