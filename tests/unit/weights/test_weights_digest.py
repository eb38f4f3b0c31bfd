"""The digest tells apart whatever differs in a single bit, and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.weights.tensor_checksum import checksum, weights_digest

BASE = {"a": torch.arange(70_001, dtype=torch.float32), "b": torch.ones(3, 5)}


def digest(**changed: torch.Tensor) -> str:
    return weights_digest({**BASE, **changed}.items())


def test_order_and_memory_layout_do_not_matter() -> None:
    assert weights_digest(reversed(BASE.items())) == digest()
    wide = torch.zeros(5, 3).t()
    wide.copy_(BASE["b"])
    assert not wide.is_contiguous()
    assert digest(b=wide) == digest()
    unaligned = torch.empty(70_002)[1:]
    assert digest(a=unaligned.copy_(BASE["a"])) == digest()


def test_name_shape_and_dtype_matter() -> None:
    assert weights_digest([("x", BASE["b"])]) != weights_digest([("y", BASE["b"])])
    assert digest(b=BASE["b"].reshape(5, 3)) != digest()
    assert digest(b=BASE["b"].view(torch.int32)) != digest()


@pytest.mark.parametrize("index", [0, 1, 32767, 32768, 65536, 70_000])
@pytest.mark.parametrize("bit", [0, 15, 31])
def test_a_single_bit_matters(index: int, bit: int) -> None:
    flipped = BASE["a"].clone()
    flipped.view(torch.int32)[index] ^= -(2**31) if bit == 31 else 1 << bit
    assert digest(a=flipped) != digest()


def test_two_flipped_signs_do_not_cancel() -> None:
    zeros = torch.zeros(1000)
    one_pair = zeros.clone()
    one_pair[[1, 3]] = -0.0
    other_pair = zeros.clone()
    other_pair[[1, 5]] = -0.0
    assert len({checksum(zeros), checksum(one_pair), checksum(other_pair)}) == 3


def test_swapped_values_matter() -> None:
    value = BASE["a"].clone()
    value[[10, 40_000]] = value[[40_000, 10]]
    assert digest(a=value) != digest()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100), st.sampled_from([torch.uint8, torch.bfloat16, torch.int64, torch.bool]))
def test_sizes_that_fill_no_word_have_digests_of_their_own(
    elements: int, dtype: torch.dtype
) -> None:
    zeros = torch.zeros(elements, dtype=dtype)
    assert checksum(zeros) == checksum(zeros.clone())
    assert checksum(zeros) != checksum(torch.zeros(elements + 1, dtype=dtype))
    if elements:
        last = zeros.clone()
        last[-1] = 1
        assert checksum(last) != checksum(zeros)
