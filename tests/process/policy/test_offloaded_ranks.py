"""Replicas of two ranks with their moments and their reference in host memory: the same training, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from safetensors.torch import load_file

from paceline.config.schema import Config
from policy_worker.checkpoint.checkpoint import Checkpointer
from tests.fixtures import ranks
from tests.fixtures.train_states import all_bits, assert_same_bits, tiny_config, tiny_state


def train(
    folder: Path, name: str, model: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> Any:
    """Two steps of two ranks with a KL term to a reference, and a checkpoint. ``model``: settings of [model]."""
    base = tiny_config(folder, tokens_per_microbatch=64, kl_coef=0.1).model_dump()
    base["model"] |= model
    base["train"] |= settings
    config = Config.model_validate(base)
    (folder / name).mkdir()
    return ranks.run(
        2, "trainer", config=config.model_dump_json(), run_dir=str(folder / name), steps=2
    )


@pytest.mark.long  # two replicas of two ranks
def test_two_ranks_train_the_same_with_moments_and_reference_on_the_host(tmp_path: Path) -> None:
    here = train(tmp_path, "here")
    there = train(tmp_path, "there", offload_optimizer=True, offload_frozen=True)
    assert there["trained"] == here["trained"]  # losses, norms and digests of the weights
    assert_same_bits(
        load_file(tmp_path / "there" / "trained-0.safetensors"),
        load_file(tmp_path / "here" / "trained-0.safetensors"),
    )
    # Slices of moments on the host are slices in the checkpoint: of one rank they are whole.
    config = tiny_config(tmp_path)
    states = [tiny_state(config) for _ in (here, there)]
    for state, found in zip(states, (here, there), strict=True):
        reader = Checkpointer(tmp_path, config)
        assert reader.restore(state, found["checkpoint"])["ranks"] == 2
        reader.close()
    assert_same_bits(all_bits(states[1]), all_bits(states[0]))
    moments = [t for name, t in all_bits(states[1]).items() if name.startswith("exp_avg_sq ")]
    assert moments and all(bool(t.any()) for t in moments)


@pytest.mark.long  # two replicas of two ranks
def test_two_ranks_train_the_same_with_block_inputs_on_the_host(tmp_path: Path) -> None:
    recomputed = {"gradient_checkpointing": True}
    here = train(tmp_path, "here", recomputed)
    there = train(tmp_path, "there", recomputed, offload_activations=True)
    assert there["trained"] == here["trained"]


@pytest.mark.long  # two replicas of two ranks, and a compiler
def test_two_ranks_train_alike_with_compiled_blocks_and_flex_attention(tmp_path: Path) -> None:
    here = train(tmp_path, "here")
    there = train(tmp_path, "there", {"compile": True, "attention": "flex"})
    for one, other in zip(here["trained"], there["trained"], strict=True):
        assert other["norm"] == pytest.approx(one["norm"], rel=1e-4)
