"""Rewards from the values that environments return."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.rpc.wire_limits import usable_reward
from rollout_worker.environments.base import (
    COMPONENT,
    TURNS,
    EnvironmentFailed,
    TurnRewards,
)
from rollout_worker.rewards.score import number_of
from rollout_worker.rewards.scoring import Scores

_MOST = 64
"""Components of a sample, as the controller checks."""
_ALLOWED = "a number, numbers by name, TurnRewards, or None"


def scores_of(results: Sequence[Any], turns: Sequence[int]) -> Scores | None:
    """Each sample's reward is the sum of its components. None: the environment does not score.
    ``turns``: the model's turns in each sample.

    Raises EnvironmentFailed for invalid rewards, and if only some samples are scored: rewards of
    one group must be comparable.
    """
    components = [_components(result) for result in results]
    if all(values is None for values in components):
        return None
    scored = [values for values in components if values is not None]
    if len(scored) < len(components):
        raise _bad(
            f"{len(scored)} of {len(components)} samples were scored and the others not; if an "
            "environment scores, it must also do so when its transcript is full (TranscriptFull)"
        )
    rewards = [math.fsum(values.values()) for values in scored]
    if not all(map(usable_reward, rewards)):
        raise _bad("the sum of a sample's rewards is not finite or above 1e9")
    placed = [_by_turn(result, count) for result, count in zip(results, turns, strict=True)]
    return Scores(rewards, scored, 0.0, placed)


def _by_turn(result: Any, turns: int) -> list[float]:
    if not isinstance(result, TurnRewards):
        return []
    if len(result.turns) != turns:
        raise _bad(f"it returned rewards of {len(result.turns)} turns, the model had {turns}")
    return [_number(value) for value in result.turns]


def _components(result: Any) -> dict[str, float] | None:
    if result is None:
        return None
    if isinstance(result, TurnRewards):
        whole = {TURNS: math.fsum(map(_number, result.turns))}
        return whole | (_components(result.outcome) or {})
    if isinstance(result, Mapping):
        if not 0 < len(result) <= _MOST:
            raise _bad(f"it returned {len(result)} rewards, 1 to {_MOST} allowed")
        return {str(name)[:64]: _number(value) for name, value in result.items()}
    return {COMPONENT: _number(result)}


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise _bad(f"it returned {value!r:.80}, not {_ALLOWED}")
    return number_of(value, lambda detail: _bad(f"it {detail}"), _ALLOWED)


def _bad(detail: str) -> EnvironmentFailed:
    return EnvironmentFailed("environment_error", detail)
