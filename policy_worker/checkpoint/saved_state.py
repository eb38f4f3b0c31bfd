"""Training state as a checkpoint has it: the names of its tensors, and random states as JSON.

model.<name>  optimizer.<name>.<moment>                 of the main part
model.<part>/<name>  optimizer.<part>/<name>.<moment>   of another one
scalar.<name>                                           a number of the objective
"""

from __future__ import annotations

import base64
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policy_worker.model.train_state import TrainState

WEIGHTS = "model."


def named_tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state, by its name in a checkpoint."""
    for name, tensor in state.named_weights():
        yield WEIGHTS + name, tensor
    for name, parameter in state.named_parameters():
        for moment, value in state.optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{name}.{moment}", value
    for name, value in state.scalars.items():
        yield f"scalar.{name}", value


def weights_of_part(names: Iterable[str], part: str) -> dict[str, str]:
    """The names that are weights of ``part``, with their names in the model; "" is the
    main part."""
    prefix = f"{WEIGHTS}{part}/" if part else WEIGHTS
    mine = [name for name in names if name.startswith(prefix) and (part or "/" not in name)]
    return {name: name.removeprefix(prefix) for name in mine}


def shared_weights(
    state: TrainState, targets: Mapping[str, Tensor], stored: Collection[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """Weights of the parts that the state shares with a checkpoint of another objective, which has
    the tensors ``stored``, and the names by which such a part differs. Both have the main part."""
    shared: dict[str, Tensor] = {}
    strange: set[str] = set()
    for part in state.parts:
        name = "" if part == state.main else part
        there = weights_of_part(stored, name).keys()
        if there or not name:
            here = weights_of_part(targets, name).keys()
            shared |= {found: targets[found] for found in here}
            strange |= here ^ there
    return shared, sorted(strange)


def random_file(rank: int) -> str:
    """The file of a checkpoint that holds the random states of ``rank``."""
    return f"random-{rank:05d}.json"


def random_states() -> dict[str, Any]:
    """Random states of torch (CPU and the current CUDA device), numpy and Python, as a JSON
    object."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = _encode(torch.cuda.get_rng_state())
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Sets the states that ``random_states`` returned. A CUDA state without a device is left
    out."""
    torch.set_rng_state(_decode(states["torch"]))
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(states["cuda"]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
