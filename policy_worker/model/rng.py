"""Random number states of a process as JSON: torch (CPU and the current CUDA device), numpy and
Python."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def file_name(rank: int) -> str:
    """The file of a checkpoint that holds the random states of ``rank``."""
    return f"random-{rank:05d}.json"


def capture() -> dict[str, Any]:
    """The states now, as a JSON object."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = _encode(torch.cuda.get_rng_state())
    return states


def reinstate(states: dict[str, Any]) -> None:
    """Sets the states that ``capture`` returned. A CUDA state without a device is left out."""
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
