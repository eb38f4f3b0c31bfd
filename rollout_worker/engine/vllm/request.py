"""State of a request while vLLM works on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout_worker.engine.base import Completion, Request, token_count
from rollout_worker.engine.transformers.rng import sample_keys


@dataclass(slots=True)
class GroupRequest:
    """One request and the names of the vLLM requests that make its completions."""

    request: Request
    aborted: bool = False
    running: dict[int, tuple[str, Completion | None]] = field(default_factory=dict)
    """By completion: the running vLLM request, and the prefix it started from."""
    done: dict[int, Completion] = field(default_factory=dict)
    reported: dict[int, int] = field(init=False)
    """Tokens of each completion at the group's last report, at first of its prefix."""
    fresh: tuple[str, Any] = ("", None)
    """Salt and vLLM request of a completion without a prefix."""
    keys: list[int] = field(init=False)
    """Seed of each completion, 64 bits."""

    def __post_init__(self) -> None:
        request, numbers = self.request, range(self.request.count)
        self.keys = sample_keys(request.params.seed, np.array(numbers)).tolist()
        self.reported = {index: token_count(request.prefix(index)) for index in numbers}
