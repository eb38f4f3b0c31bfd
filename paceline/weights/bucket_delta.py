"""Lossless delta of a bucket of weights: the positions and differences of the words that changed.

At a small learning rate a step changes few 16-bit words of bf16 weights, most of them by a unit in
the last place. A delta has four parts:

    head    int64[3]   number of changed words, of gap bytes, of wide differences
    gaps    uint8      words between changes; 255: 255 words without a change
    steps   int8       difference of each changed word, modulo 2**16; -128: too large for a byte
    wide    int16      differences that are too large, in their order

One change costs two bytes, as a word does: a bucket with 5 % of its words changed takes 5 % of its
bytes.
"""

import torch
from torch import Tensor

from paceline.weights.weight_manifest import WeightsRefused

_HEAD = 3
_SKIP = 255
_WIDE = -128

# Odd, so that the upper and the lower halves of 32-bit words are both looked at.
_SAMPLE_STRIDE = 31

WORTH = 0.25
"""Largest share of a bucket's bytes that its delta may take; a denser one travels whole."""


def encode_delta(base: Tensor, bucket: Tensor) -> Tensor | None:
    """uint8[m] that turns ``base`` into ``bucket``; None if the bucket had better travel whole.
    ``base``, ``bucket``: contiguous uint8[n] on one device, n even."""
    old, new = base.view(torch.int16), bucket.view(torch.int16)
    sample = slice(None, None, _SAMPLE_STRIDE)
    if (new[sample] != old[sample]).float().mean() > 2 * WORTH:
        return None
    changed = (new != old).nonzero().reshape(-1)
    if changed.numel() * 2 > WORTH * bucket.numel():
        return None
    gaps = _encode_gaps(changed)
    # Differences wrap modulo 2**16, and so does the sum that undoes them.
    wide = new[changed] - old[changed]
    small = (wide > _WIDE) & (wide < 128)
    steps = torch.where(small, wide, _WIDE).to(torch.int8)
    wide = wide[~small]
    head = torch.tensor([changed.numel(), gaps.numel(), wide.numel()], dtype=torch.int64)
    parts = (head.to(bucket.device), gaps, steps, wide)
    delta = torch.cat([part.view(torch.uint8) for part in parts])
    return delta if delta.numel() <= WORTH * bucket.numel() else None


def apply_delta(bucket: Tensor, delta: Tensor) -> None:
    """Turns the base in ``bucket``, contiguous uint8[n], into what the delta was made of, in place.
    Raises WeightsRefused if the delta is malformed or reaches beyond the bucket; the bucket is then
    as it was."""
    changes, gap_bytes, wides = _head(delta)
    gaps_at = _HEAD * 8
    steps_at = gaps_at + gap_bytes
    wide_at = steps_at + changes
    if delta.numel() != wide_at + 2 * wides:
        raise WeightsRefused("a delta has another size than it says")
    words = bucket.view(torch.int16)
    where = _decode_gaps(delta[gaps_at:steps_at])
    if where.numel() != changes or (changes and int(where[-1]) >= words.numel()):
        raise WeightsRefused("a delta does not fit the bucket that it is for")
    steps = delta[steps_at:wide_at].view(torch.int8)
    differences = steps.to(torch.int16)
    large = steps == _WIDE
    if int(large.sum()) != wides:
        raise WeightsRefused("a delta lacks differences that it announces")
    # A copy: the wide differences may begin at an odd byte.
    differences[large] = delta[wide_at:].clone().view(torch.int16)
    words[where] += differences


def _encode_gaps(changed: Tensor) -> Tensor:
    """uint8: ascending positions, each as the number of unchanged words before it."""
    first = torch.full((1,), -1, dtype=torch.int64, device=changed.device)
    gaps = torch.diff(changed, prepend=first) - 1
    skips = gaps // _SKIP
    # The last byte of each gap, in an array that is filled with the skips between them.
    ends = torch.arange(gaps.numel(), device=gaps.device) + skips.cumsum(0)
    total = int(ends[-1]) + 1 if gaps.numel() else 0
    coded = torch.full((total,), _SKIP, dtype=torch.uint8, device=gaps.device)
    coded[ends] = (gaps % _SKIP).to(torch.uint8)
    return coded


def _decode_gaps(coded: Tensor) -> Tensor:
    ends = coded != _SKIP
    # A skip moves on by 255 words, the end of a gap by the gap and the changed word itself.
    return (coded.to(torch.int64) + ends).cumsum(0)[ends] - 1


def _head(delta: Tensor) -> list[int]:
    if delta.numel() < _HEAD * 8:
        raise WeightsRefused("a delta is shorter than its head")
    counts: list[int] = delta[: _HEAD * 8].clone().view(torch.int64).tolist()
    if not all(0 <= count <= delta.numel() for count in counts):
        raise WeightsRefused("a delta has impossible counts")
    return counts
