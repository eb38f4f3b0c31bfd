"""Soft penalty of completions that come close to the length limit.

Source: soft overlong punishment, DAPO, Yu et al., arXiv 2503.14476, equation 13, times
reward.overlong_penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.config.sections.training import RewardConfig
from rollout_worker.rewards.scoring import Scores

COMPONENT = "overlong"


def penalised(scores: Scores, tokens: Sequence[int], limit: int, config: RewardConfig) -> Scores:
    """``tokens``: of each completion; ``limit``: the most that one may have. The penalty is a
    component of its own."""
    if not config.overlong_buffer:
        return scores
    losses = [config.overlong_penalty * _share(n, limit, config.overlong_buffer) for n in tokens]
    return replace(
        scores,
        rewards=[reward + loss for reward, loss in zip(scores.rewards, losses, strict=True)],
        components=[
            {**values, COMPONENT: loss}
            for values, loss in zip(scores.components, losses, strict=True)
        ],
    )


def _share(tokens: int, limit: int, buffer: int) -> float:
    """0 up to the buffer, -1 from the limit on."""
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))
