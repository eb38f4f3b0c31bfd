"""The decoder interface: one forward for new prompts, one for the next token of every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollout_worker.engine.transformers.kv_cache import CacheShape, SlotCache


@dataclass(frozen=True, slots=True)
class Prefilled:
    """``logits`` float32 [sequences, vocabulary] after each sequence's last token; ``keys`` and
    ``values`` [layers, sequences, heads, tokens, dim], meaningless beyond a sequence's length."""

    logits: Tensor
    keys: Tensor
    values: Tensor


class Decoder(Protocol):
    @property
    def shape(self) -> CacheShape: ...

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Prefilled:
        """``tokens`` int64 [sequences, longest], padded on the right; ``lengths`` int64
        [sequences]."""

    def decode(self, cache: SlotCache, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        """Feeds one token to each of rows 0 .. n-1 and stores its keys and values.

        ``tokens``, ``positions`` int64 [n]; ``length``: 1 + the largest position. Returns logits
        float32 [n, vocabulary].
        """

    def refresh(self) -> None:
        """The model's weights have changed in place."""


def largest_gap(decoder: Decoder, model: torch.nn.Module, vocabulary: int) -> float:
    """Largest difference between the decoder's log-probs and those of the model's own plain
    forward.

    Over two sequences of unequal length, one of them decoded token by token at the end. It is
    checked at every start: no test can cover all architectures and settings.
    """
    device = decoder.shape.device
    lengths = torch.tensor([7, 4], device=device)
    steps = 2
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (2, 7 + steps), generator=generator).to(device)
    with torch.inference_mode():
        prefilled = decoder.prefill(tokens[:, :7], lengths)
        cache = SlotCache(decoder.shape)
        cache.reserve(2, 7 + steps, 0, 0)
        rows = torch.arange(2, device=device)
        cache.fill(rows, rows, prefilled.keys, prefilled.values)
        mine = [prefilled.logits]
        for step in range(steps):
            positions = lengths + step
            fed = tokens[rows, positions]
            mine.append(decoder.decode(cache, fed, positions, 8 + step))
        gap = 0.0
        for row in range(2):
            n = int(lengths[row])
            plain = model(input_ids=tokens[row : row + 1, : n + steps], use_cache=False).logits
            expected = torch.log_softmax(plain[0, n - 1 :].float(), -1)
            got = torch.log_softmax(torch.stack([logits[row] for logits in mine]), -1)
            gap = max(gap, (got - expected).abs().max().item())
    return gap
