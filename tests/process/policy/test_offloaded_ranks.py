"""Replicas of two ranks with their moments and their reference in host memory: the same training,
bit for bit."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from paceline.config.schema import Config
from policy_worker.checkpoint.checkpoint import Checkpointer
from tests.fixtures import ranks
from tests.fixtures.train_states import all_bits, assert_same_bits, tiny_config, tiny_state

pytestmark = pytest.mark.long

RECOMPUTED = {"gradient_checkpointing": True}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "on_host": ({}, {"offload_optimizer": True, "offload_frozen": True}),
    "recomputed": (RECOMPUTED, {}),
    "inputs_on_host": (RECOMPUTED, {"offload_activations": True}),
    "compiled": ({"compile": True, "attention": "flex"}, {}),
}
"""Of [model] and of [train]."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offloaded")


def train(folder: Path, *names: str) -> dict[str, Any]:
    """Two steps with each setting, by one replica of two ranks with a KL term to a reference, and a
    checkpoint."""
    each = []
    for name in names:
        model, train = SETTINGS[name]
        base = tiny_config(folder, tokens_per_microbatch=64, kl_coef=0.1).model_dump()
        base["model"] |= model
        base["train"]["memory"] |= train
        (folder / name).mkdir()
        config = Config.model_validate(base).model_dump_json()
        arguments = {"config": config, "run_dir": str(folder / name), "steps": 2}
        each.append(("trainer", arguments))
    return dict(zip(names, ranks.run_each(2, each), strict=True))


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Any]:
    return train(folder, "plain", "on_host", "recomputed", "inputs_on_host")


def test_two_ranks_train_the_same_with_moments_and_reference_on_the_host(
    folder: Path, trained: dict[str, Any]
) -> None:
    here, there = trained["plain"], trained["on_host"]
    assert there["trained"] == here["trained"]  # losses, norms and digests of the weights
    assert_same_bits(
        load_file(folder / "on_host" / "trained-0.safetensors"),
        load_file(folder / "plain" / "trained-0.safetensors"),
    )
    # Slices of moments on the host are slices in the checkpoint: of one rank they are whole.
    config = tiny_config(folder)
    states = [tiny_state(config) for _ in (here, there)]
    for state, found in zip(states, (here, there), strict=True):
        reader = Checkpointer(folder, config)
        assert reader.restore(state, found["checkpoint"])["ranks"] == 2
        reader.close()
    assert_same_bits(all_bits(states[1]), all_bits(states[0]))
    moments = [t for name, t in all_bits(states[1]).items() if name.startswith("exp_avg_sq ")]
    assert moments and all(bool(t.any()) for t in moments)


def test_two_ranks_train_the_same_with_block_inputs_on_the_host(trained: dict[str, Any]) -> None:
    assert trained["inputs_on_host"]["trained"] == trained["recomputed"]["trained"]
