"""Small training states, and steps that move every parameter, for tests of what keeps or splits them."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.config.schema import Config
from policy_worker.optimizer import learning_rate, set_learning_rate
from policy_worker.replica import Replica
from policy_worker.sharding import load_sharded_state
from policy_worker.state import TrainState
from tests.helpers.tiny_model import make_tiny_model


def tiny_config(folder: Path, **train) -> Config:
    """A config whose model is a tiny Qwen3 in ``folder`` (made if it is not there)."""
    path = folder / "tiny-model"
    if not path.exists():
        make_tiny_model(path, hidden=32)
    settings = {"lr": 1e-2, "schedule": "linear", "steps": 50, "weight_decay": 0.01} | train
    return Config.model_validate(
        {"model": {"path": str(path), "device": "cpu"}, "data": {"path": "none"}, "train": settings}
    )


def tiny_state(config: Config) -> TrainState:
    torch.set_num_threads(1)
    state = load_sharded_state(config, Replica(), torch.device("cpu"))
    state.version = 0
    return state


def synthetic_step(state: TrainState) -> float:
    """One optimizer step on tokens drawn from torch's random state. Returns the loss."""
    vocabulary = state.model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (4, 12))
    loss = state.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    set_learning_rate(state.optimizer, learning_rate(state.step + 1, state.config.train))
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step += 1
    state.version += 1
    return float(loss.detach())


def all_bits(state: TrainState) -> dict[str, torch.Tensor]:
    """Copies of every tensor of an unsharded state, by a name of its own."""
    bits = {f"weight {name}": t.clone() for name, t in state.named_weights()}
    for name, parameter in state.model.named_parameters():
        for moment, value in state.optimizer.state[parameter].items():
            bits[f"{moment} {name}"] = value.clone()
    return bits


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(_raw(tensor), _raw(other[name])), name


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
