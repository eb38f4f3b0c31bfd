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

from collections.abc import Sequence

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


def encode_deltas(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
    """For each base and bucket uint8[m] on the host that turns the one into the other; None if the
    bucket had better travel whole. However many they are, the host waits for their device three
    times. Contiguous uint8[n], all on one device, n even."""
    words = [(base.view(torch.int16), bucket.view(torch.int16)) for base, bucket in pairs]
    sample = slice(None, None, _SAMPLE_STRIDE)
    shares = _numbers([(new[sample] != old[sample]).float().mean() for old, new in words])
    masks = {i: words[i][1] != words[i][0] for i, n in enumerate(shares) if n <= 2 * WORTH}
    counts = _numbers([mask.count_nonzero() for mask in masks.values()])
    coded = {
        i: _coded(*words[i], torch.nonzero_static(mask, size=int(count)).view(-1))
        for (i, mask), count in zip(masks.items(), counts, strict=True)
        if count * 2 <= WORTH * pairs[i][1].numel()
    }
    deltas: list[Tensor | None] = [None] * len(pairs)
    if coded:
        parts = torch.cat(list(coded.values())).cpu().split([c.numel() for c in coded.values()])
        for i, part in zip(coded, parts, strict=True):
            delta = _trimmed(part)
            deltas[i] = delta if delta.numel() <= WORTH * pairs[i][1].numel() else None
    return deltas


def _numbers(scalars: Sequence[Tensor]) -> list[float]:
    return torch.stack(list(scalars)).tolist() if scalars else []


def _coded(old: Tensor, new: Tensor, changed: Tensor) -> Tensor:
    """The delta of the words ``changed``, with room for the most gaps and wide differences that
    there may be: to know how many there are, the host would have to wait."""
    count = changed.numel()
    gaps = torch.diff(changed, prepend=changed.new_full((1,), -1)) - 1
    skips = gaps // _SKIP
    # The last byte of each gap, in an array that is filled with the skips between them.
    ends = torch.arange(count, device=gaps.device) + skips.cumsum(0)
    coded = gaps.new_full((count + new.numel() // _SKIP,), _SKIP, dtype=torch.uint8)
    coded[ends] = (gaps % _SKIP).to(torch.uint8)
    # Differences wrap modulo 2**16, and so does the sum that undoes them.
    wide = new[changed] - old[changed]
    small = (wide > _WIDE) & (wide < 128)
    steps = torch.where(small, wide, _WIDE).to(torch.int8)
    wide = wide[torch.nonzero_static(~small, size=count, fill_value=0).view(-1)]
    head = (gaps.new_full((), count), count + skips.sum(), (~small).sum())
    return torch.cat([part.view(torch.uint8) for part in (torch.stack(head), coded, steps, wide)])


def _trimmed(coded: Tensor) -> Tensor:
    changes, gap_bytes, wides = coded[: _HEAD * 8].clone().view(torch.int64).tolist()
    room = coded.numel() - _HEAD * 8 - 3 * changes
    head_and_gaps, steps, wide = coded.split([_HEAD * 8 + room, changes, 2 * changes])
    return torch.cat([head_and_gaps[: _HEAD * 8 + gap_bytes], steps, wide[: 2 * wides]])


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
