"""Adaptive coefficient of a KL penalty.

Source: Ziegler et al., "Fine-tuning language models from human preferences", arXiv 1909.08593,
section 2.2.
"""

from __future__ import annotations

ERROR_LIMIT = 0.2
"""Relative errors are clipped to it, so that one step cannot throw the coefficient about."""


def adapted(
    coefficient: float, kl: float, completions: float, *, target: float, horizon: float
) -> float:
    """The coefficient after a step of ``completions`` with the mean ``kl``, in nats per completion.

    error = clip(kl / target - 1, -0.2, 0.2); coefficient * (1 + error * completions / horizon). The
    paper's gain of 0.1 is that of its batches: 1,024 completions of a horizon of 10,000. In one
    step the coefficient falls to a tenth at most: from 0 it could never rise again.
    """
    error = min(max(kl / target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
    return coefficient * max(0.1, 1.0 + error * completions / horizon)
