"""What the engine keeps of a request while vLLM works on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout_worker.engine.base import Completion, Request
from rollout_worker.engine.transformers.rng import sample_keys


@dataclass(slots=True)
class GroupRequest:
    """One request and the names of the vLLM requests that make its samples now."""

    request: Request
    aborted: bool = False
    live: set[str] = field(default_factory=set)
    running: dict[int, tuple[str, Completion | None]] = field(default_factory=dict)
    """By sample: the vLLM request that makes it now, and what it had before that."""
    done: dict[int, Completion] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    """Tokens of each sample when the group was reported last."""
    fresh: tuple[str, Any] = ("", None)
    """What the engine is asked for a sample without a prefix, and the salt in it."""
    keys: list[int] = field(init=False)
    """Of each sample's random numbers, 64 bits."""

    def __post_init__(self) -> None:
        numbers = np.arange(self.request.count)
        self.keys = sample_keys(self.request.params.seed, numbers).tolist()
