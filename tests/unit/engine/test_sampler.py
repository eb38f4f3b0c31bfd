"""Sampling draws from the distribution it says it draws from."""

from typing import Any

import numpy as np
import pytest
import torch

from rollout_worker.engine.transformers.sampler import SamplerRows, sample, sample_keys, uniforms

N = 20_000
P = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05, 0.0])


def draw(
    uniform: np.ndarray, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    n = len(uniform)
    rows = SamplerRows(
        np.full(n, temperature, dtype=np.float32),
        np.full(n, top_p, dtype=np.float32),
        np.full(n, top_k, dtype=np.int32),
        np.zeros(n, dtype=bool),
        uniform,
    )
    return sample(P.log().expand(n, -1).clone(), rows)


def spread() -> np.ndarray:
    return uniforms(sample_keys(5, np.arange(N)), np.zeros(N, dtype=np.int64))


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05, 0.0]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0, 0]),
        # The token that crosses the mass is kept.
        ({"top_p": 0.8}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0, 0]),
        # The mass is that within what top_k has kept.
        ({"top_k": 3, "top_p": 0.7}, [4 / 7, 3 / 7, 0, 0, 0, 0]),
        ({"temperature": 0.5}, (P**2 / (P**2).sum()).tolist()),
    ],
)
def test_frequencies_are_the_probabilities(filters: dict[str, Any], expected: list[float]) -> None:
    tokens, logprobs = draw(spread(), **filters)
    counts = np.bincount(tokens, minlength=6) / N
    np.testing.assert_allclose(counts, expected, atol=0.015)
    np.testing.assert_allclose(np.exp(logprobs), np.array(expected)[tokens], atol=1e-5)


def test_impossible_tokens_are_never_drawn_at_the_ends_of_the_unit_interval() -> None:
    ends = np.array([2.0**-24, 1 - 2.0**-24, 0.5], dtype=np.float32)
    for filters in ({}, {"top_k": 4}, {"top_p": 0.99}):
        tokens, logprobs = draw(ends, **filters)
        assert (tokens < 5).all() and np.isfinite(logprobs).all()


def test_random_numbers_depend_on_seed_sample_and_position_only() -> None:
    keys = sample_keys(1, np.arange(4))
    first = uniforms(keys, np.array([0, 1, 2, 3]))
    again = uniforms(sample_keys(1, np.array([2])), np.array([2]))
    assert again[0] == first[2]
    assert sample_keys(1 << 63, np.arange(1)) != sample_keys(0, np.arange(1)), "64 bits"
    grid = np.concatenate(
        [
            uniforms(sample_keys(s, np.arange(50)), np.full(50, p))
            for s in range(20)
            for p in range(20)
        ]
    )
    assert len(np.unique(grid)) > 0.99 * len(grid)
    assert grid.min() > 0 and grid.max() < 1
    assert abs(grid.mean() - 0.5) < 0.01
