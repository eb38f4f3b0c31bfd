"""Deltas of buckets: lossless, small if little changed, refused if they make no sense."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.weights.bucket_delta import WORTH, apply_delta, encode_deltas
from paceline.weights.tensor_checksum import checksum, checksums
from paceline.weights.weight_manifest import WeightsRefused

WORDS = 5_000


def bucket(words: Tensor) -> Tensor:
    return words.to(torch.int16).view(torch.uint8)


def encode_delta(base: Tensor, new: Tensor) -> Tensor | None:
    return encode_deltas([(base, new)])[0]


def random_words(seed: int, count: int = WORDS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator, dtype=torch.int16)


@settings(deadline=None, max_examples=200)
@given(
    positions=st.sets(st.integers(0, WORDS - 1), max_size=400),
    steps=st.lists(st.integers(-(1 << 15), (1 << 15) - 1), min_size=1, max_size=8),
)
def test_any_change_is_undone_to_the_bit(positions: set[int], steps: list[int]) -> None:
    base = bucket(random_words(0))
    new = base.clone()
    for i, position in enumerate(sorted(positions)):
        new.view(torch.int16)[position] += steps[i % len(steps)]
    delta = encode_delta(base, new)
    assert delta is not None
    rebuilt = base.clone()
    apply_delta(rebuilt, delta)
    assert torch.equal(rebuilt, new)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 3_000])
def test_gaps_at_the_limits_of_a_byte(gap: int) -> None:
    base = torch.zeros(WORDS * 2, dtype=torch.uint8)
    new = base.clone()
    new.view(torch.int16)[[gap, gap + gap // 2 + 1]] = 1
    delta = encode_delta(base, new)
    assert delta is not None
    apply_delta(base, delta)
    assert torch.equal(base, new)


def test_a_step_of_adamw_at_a_small_learning_rate_takes_a_twentieth_of_the_bytes() -> None:
    torch.manual_seed(0)
    master = torch.nn.Parameter(torch.randn(1 << 18) * 0.02)
    optimizer = torch.optim.AdamW([master], lr=1e-6)
    shares = []
    for _ in range(5):
        base = master.detach().bfloat16().view(torch.uint8)
        master.grad = torch.randn_like(master)
        optimizer.step()
        new = master.detach().bfloat16().view(torch.uint8)
        delta = encode_delta(base, new)
        assert delta is not None
        shares.append(delta.numel() / new.numel())
        apply_delta(base, delta)
        assert torch.equal(base, new)
    assert max(shares) < 0.05, shares
    assert min(shares) > 0, "nothing was trained"


def test_several_buckets_at_once_have_the_deltas_and_checksums_of_each() -> None:
    bases = [bucket(random_words(i, WORDS + i)) for i in range(5)]
    news = [base.clone() for base in bases]
    for new, changed in zip(news, (0, 1, 300, WORDS, 2_400), strict=True):
        new.view(torch.int16)[torch.randperm(WORDS)[:changed]] += 200
    pairs = list(zip(bases, news, strict=True))
    for together, (base, new) in zip(encode_deltas(pairs), pairs, strict=True):
        alone = encode_delta(base, new)
        assert (together is None) == (alone is None)
        assert together is None or torch.equal(together, alone)
    assert [d is None for d in encode_deltas(pairs)] == [False, False, False, True, True]
    assert checksums(news) == [checksum(new) for new in news]


def test_a_delta_never_takes_more_than_it_is_worth() -> None:
    assert encode_delta(bucket(random_words(1)), bucket(random_words(2))) is None
    base = bucket(random_words(3))
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        new = base.clone()
        changed = torch.randperm(WORDS)[: int(share * WORDS)]
        new.view(torch.int16)[changed] += 1_000
        delta = encode_delta(base, new)
        assert delta is None or delta.numel() <= WORTH * base.numel()


@pytest.mark.parametrize(
    "damage",
    [
        lambda delta: delta[:10],
        lambda delta: delta[:-1],
        lambda delta: torch.cat([delta, delta[:2]]),
        lambda delta: with_head(delta, 0, 1 << 60),
        lambda delta: with_head(delta, 0, -1),
        lambda delta: with_head(delta, 1, 2),
        lambda delta: with_head(delta, 2, 0),
        lambda delta: with_byte(delta, 24, 255),
        lambda delta: with_byte(delta, 26, 254),
        lambda delta: with_byte(delta, 27, 128),
    ],
)
def test_a_delta_that_makes_no_sense_is_refused_and_changes_nothing(damage: object) -> None:
    base = torch.zeros(200, dtype=torch.uint8)
    new = base.clone()
    new.view(torch.int16)[[3, 50, 99]] = torch.tensor([1, 2_000, 3], dtype=torch.int16)
    delta = encode_delta(base, new)
    assert delta is not None
    with pytest.raises(WeightsRefused):
        apply_delta(base, damage(delta))  # type: ignore[operator]
    assert not base.any()


def with_head(delta: Tensor, index: int, count: int) -> Tensor:
    damaged = delta.clone()
    damaged[:24].view(torch.int64)[index] = count
    return damaged


def with_byte(delta: Tensor, index: int, value: int) -> Tensor:
    damaged = delta.clone()
    damaged[index] = value
    return damaged
